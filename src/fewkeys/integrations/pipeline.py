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

        answer_prefix: what every answer begins with. options: of `model.generate`, other than its inputs and those of
        several answers; by default answers are greedy.
        Cost: the context once, by the plan, and for each question its own tokens and those of its answer.
        """
        if (question is None) == (questions is None):
            raise ValueError("question, questions: expected one of the two; questions=[...] asks several")
        asked = [question] if questions is None else [*questions]
        if isinstance(questions, str) or not all(isinstance(text, str) for text in (context, *asked)):
            raise TypeError("context, question, questions: expected texts, one context, and questions as a list")
        before, after, special = self._parts(context)
        context_ids = self._ids(before, special)
        memory: Any = cache(self.model, self.plan, leaves=self.leaves)
        with closing(memory):
            mask = torch.ones_like(context_ids)
            self.model(context_ids, past_key_values=memory, attention_mask=mask, logits_to_keep=1)
            answers = []
            for text in asked:
                ids = torch.cat([context_ids, self._ids(f"{text}{after}{answer_prefix}", False)], 1)
                output = self.model.generate(
                    ids,
                    max_new_tokens=max_new_tokens,
                    attention_mask=torch.ones_like(ids),
                    past_key_values=copy.deepcopy(memory),
                    use_cache=True,
                    num_beams=1,
                    num_return_sequences=1,
                    return_dict_in_generate=False,
                    **{"do_sample": False, "tokenizer": self.tokenizer} | options,
                )
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
        wanted = "that puts the user's message into the prompt once, as it is, or None for plain prompts"
        raise ValueError(f"tokenizer: expected a chat template {wanted}")

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
        name = type(model).__name__
        raise ValueError(f"model: expected one that generates text, got {name}; load it by AutoModelForCausalLM")
    return Pipeline(model, tokenizer, plan, leaves)
