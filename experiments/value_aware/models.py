"""The two models: an encoder with a masked-language-model head, and a causal language model made from nothing."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from experiments.value_aware.data import Batch
from torch import Tensor
from torch.nn.functional import cross_entropy

import fewkeys as fk
from fewkeys.core.weights import Weights
from fewkeys.demo import model_folder
from fewkeys.integrations.loading import quiet

VOCABULARY = 1024
"""Byte pairs of the causal model's own tokenizer: so few that a short training sees each of them often."""


def load_encoder(folder: Path | None) -> tuple[Any, Any]:
    """A masked language model and its tokenizer: the checkpoint in `folder`, or MiniLM with a new head.

    The head is BERT's: dense, GELU, LayerNorm, and a decoder tied to the word embeddings.
    """
    from transformers import AutoModelForMaskedLM, AutoTokenizer

    place = model_folder() if folder is None else folder
    torch.manual_seed(0)
    with quiet():
        model = AutoModelForMaskedLM.from_pretrained(
            place,
            use_safetensors=True,
            attention_probs_dropout_prob=0.0,
            hidden_dropout_prob=0.0,
            local_files_only=True,
        )
        return model.eval(), AutoTokenizer.from_pretrained(place, local_files_only=True)


def train_tokenizer(text: str) -> Any:
    """A byte-level BPE tokenizer of `VOCABULARY` tokens."""
    from tokenizers import ByteLevelBPETokenizer
    from transformers import PreTrainedTokenizerFast

    with quiet():
        trained = ByteLevelBPETokenizer()
        trained.train_from_iterator(text.splitlines(keepends=True), vocab_size=VOCABULARY, show_progress=False)
        return PreTrainedTokenizerFast(tokenizer_object=trained._tokenizer)


def new_language_model(length: int) -> Any:
    """A small Llama with random weights: 4 layers, 8 heads of 32 dimensions."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=704,
        num_hidden_layers=4,
        num_attention_heads=8,
        max_position_embeddings=length,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
    )
    return LlamaForCausalLM(config).eval()


def logits(model: Any, batch: Batch) -> tuple[Tensor, Tensor]:
    """Logits (M, vocabulary) and labels (M,) at the positions to be predicted; the others are not decoded."""
    hidden = model.base_model(input_ids=batch.ids)[0]
    chosen = batch.labels >= 0
    head = model.get_output_embeddings() if model.base_model_prefix == "model" else model.cls
    return head(hidden[chosen]), batch.labels[chosen]


def train(
    model: Any,
    batches: Iterator[Batch],
    weights: Weights,
    steps: int,
    rate: float,
    progress: Callable[[str], None],
) -> list[float]:
    """AdamW with a tenth of warm-up and a cosine decay; `weights` is the kernel of every layer. Returns the losses."""
    optimiser = torch.optim.AdamW(model.parameters(), rate, betas=(0.9, 0.98), weight_decay=0.01)
    warm = max(1, steps // 10)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimiser,
        lambda s: min((s + 1) / warm, 0.5 + 0.5 * math.cos(math.pi * max(0, s - warm) / max(1, steps - warm))),
    )
    losses, start = [], perf_counter()
    with fk.apply(model, fk.Plan(weights=weights)):
        for step in range(steps):
            loss = cross_entropy(*logits(model, next(batches)))
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimiser.step()
            schedule.step()
            optimiser.zero_grad(set_to_none=True)
            losses.append(float(loss.detach()))
            if step % 10 == 9 or step == steps - 1:
                recent = sum(losses[-10:]) / len(losses[-10:])
                progress(f"step {step + 1}/{steps}, loss {recent:.3f}, {perf_counter() - start:.0f} s")
    return losses


@torch.no_grad()
def judge(model: Any, batch: Batch) -> dict[str, list[float]]:
    """Per sequence: how many predictions, how many of them right, and the sum of their losses."""
    found, labels = logits(model, batch)
    owner = (batch.labels >= 0).nonzero()[:, 0]
    right = (found.argmax(-1) == labels).double()
    loss = cross_entropy(found, labels, reduction="none").double()

    def per_sequence(values: Tensor) -> list[float]:
        return torch.zeros(len(batch.ids), dtype=torch.float64).index_add(0, owner, values).tolist()

    return {"count": per_sequence(torch.ones_like(loss)), "right": per_sequence(right), "loss": per_sequence(loss)}
