"""Questions about a long context, which is read once. Every answer continues a fork of its cache."""

import copy
from collections.abc import Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from fewkeys.integrations.cache import cache
from fewkeys.integrations.interface import unwrapped
from fewkeys.integrations.transformers import LayerPlan
from fewkeys.memory.rows import LeafType
from fewkeys.plan import Plan

_MARK = "\N{NUL}"
"""A placeholder for the question in a chat template."""
ONE_ANSWER = {"num_beams": 1, "num_return_sequences": 1, "return_dict_in_generate": False}
"""Options of `model.generate` that are fixed: each answer is one text."""
MADE = (
    "inputs",
    "input_ids",
    "inputs_embeds",
    "attention_mask",
    "position_ids",
    "past_key_values",
    "generation_config",
)
"""Options of `model.generate` that the pipeline makes."""


@dataclass(frozen=True, eq=False)
class Pipeline:
    """Answers questions about contexts; made by `fewkeys.pipeline`."""

    model: Any
    tokenizer: Any
    plan: Plan | Sequence[LayerPlan]
    leaves: LeafType | None

    @torch.no_grad()
    def __call__(
        self,
        context: str,
        *,
        question: str | None = None,
        questions: Iterable[str] | None = None,
        answer_prefix: str = "",
        max_new_tokens: int = 50,
        **options: Any,
    ) -> dict[str, Any]:
        """{"answer": text} of `question`, or {"answers": list of texts} of `questions`, none of which sees another.

        answer_prefix: what every answer begins with. options: for `model.generate`; answers are greedy otherwise.
        Cost: the context once, by the plan, and for each question its own tokens and those of its answer.
        """
        if (question is None) == (questions is None):
            raise ValueError("question, questions: expected one of the two; questions=[...] asks several")
        if isinstance(questions, str):
            raise TypeError("questions: expected a list of texts, got one text; pass question= for a single one")
        asked = [question] if questions is None else [*questions]
        for name, text in [("context", context), *(("question", text) for text in asked)]:
            if not isinstance(text, str):
                raise TypeError(
                    f"{name}: expected a text, got {type(text).__name__}; pass one context and a list as questions="
                )
        for name in options.keys() & MADE:
            raise TypeError(f"{name}: expected none, as the pipeline makes it; give texts, and options by name")
        for name, only in ONE_ANSWER.items():
            if options.get(name, only) != only:
                raise ValueError(
                    f"{name}: expected {only}, one text for each question, got {options[name]}; leave it out"
                )
        before, after, special = self._parts(context)
        context_ids = self._ids(before, special)
        memory: Any = cache(self.model, self.plan, leaves=self.leaves)
        with closing(memory):
            mask = torch.ones_like(context_ids)
            self.model(context_ids, past_key_values=memory, attention_mask=mask, logits_to_keep=1)
            answers = []
            for text in asked:
                ids = torch.cat([context_ids, self._ids(f"{text}{after}{answer_prefix}", False)], 1)
                arguments = {"attention_mask": torch.ones_like(ids), "past_key_values": copy.deepcopy(memory)}
                arguments |= {"do_sample": False, "use_cache": True, **ONE_ANSWER, **options}
                if arguments.get("stop_strings") is not None:
                    arguments.setdefault("tokenizer", self.tokenizer)
                output = self.model.generate(ids, max_new_tokens=max_new_tokens, **arguments)
                answers.append(str(self.tokenizer.decode(output[0, ids.shape[1] :], skip_special_tokens=True)))
        return {"answer": answers[0]} if questions is None else {"answers": answers}

    def _parts(self, context: str) -> tuple[str, str, bool]:
        """The texts before and after a question; whether the first needs special tokens, which chat templates have."""
        if getattr(self.tokenizer, "chat_template", None) is None:
            return f"{context}\n\n", "\n", True
        content, marks = f"{context}\n\n{_MARK}", context.count(_MARK) + 1
        for form in (content, [{"type": "text", "text": content}]):  # templates read the one or the other
            messages = [{"role": "user", "content": form}]
            text = str(self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False))
            if text.count(_MARK) == marks:
                before, _, after = text.rpartition(_MARK)
                return before, after, False
        raise ValueError(
            "tokenizer: expected a chat template that puts the user's message into the prompt once, as it is, got one "
            "that does not; set tokenizer.chat_template to one, or to None for plain prompts"
        )

    def _ids(self, text: str, special: bool) -> Any:
        """Token ids (1, N)."""
        encoding = self.tokenizer(text, add_special_tokens=special, return_tensors="pt")
        return encoding["input_ids"].to(self.model.device)


def pipeline(
    model: nn.Module, tokenizer: Any, plan: Plan | Sequence[LayerPlan], *, leaves: LeafType | None = None
) -> Pipeline:
    """Questions about long contexts, in the manner of kvpress's pipeline.

        ask = fk.pipeline(model, tokenizer, fk.budget(256, is_causal=True))
        ask(context, questions=["Who wrote it?", "When?"])["answers"]

    model, plan, leaves: as in `fewkeys.cache`. Chat models are asked by their template, others by context, a blank
    line, question and a new line. `ValueError` as of `fewkeys.cache`, and for a model that generates no text.
    """
    if not unwrapped(model).can_generate():
        raise ValueError(
            f"model: expected a decoder that generates text, got {type(model).__name__}; load it by "
            "AutoModelForCausalLM, or embed with an encoder by fewkeys.apply"
        )
    if not callable(tokenizer):
        raise TypeError(
            f"tokenizer: expected the model's tokenizer, got {type(tokenizer).__name__}; load it by AutoTokenizer"
        )
    return Pipeline(model, tokenizer, plan, leaves)
