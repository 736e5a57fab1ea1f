"""The two decoders that are trained here: a language model of text, and one that looks up pairs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from time import perf_counter
from typing import Any

import torch
from experiments.causal.recall import VOCABULARY as RECALL_VOCABULARY
from experiments.value_aware.data import Batch
from torch import nn
from torch.nn.functional import cross_entropy

CONTEXT = 2048


def text_model(vocabulary: int) -> Any:
    """A Llama of 4 layers, 4 query heads and 2 key heads of 64 dimensions, random weights."""
    # About 1 / sqrt(width): with the usual 0.02, so narrow a model hardly starts.
    return _llama(
        1,
        vocab_size=vocabulary,
        hidden_size=256,
        intermediate_size=704,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.0625,
        rope_theta=100_000.0,
        tie_word_embeddings=True,
    )


def recall_model() -> Any:
    """A Llama of 2 layers and 4 heads of 32 dimensions, random weights."""
    return _llama(
        0,
        vocab_size=RECALL_VOCABULARY,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        tie_word_embeddings=False,
    )


def _llama(seed: int, **sizes: Any) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(**sizes, max_position_embeddings=CONTEXT, bos_token_id=None, eos_token_id=None)
    return LlamaForCausalLM(config)


def train(model: nn.Module, batches: Iterator[Batch], steps: int, rate: float, say: Callable[[str], None]) -> None:
    """AdamW with a twentieth of warm-up and a cosine decay."""
    optimiser = torch.optim.AdamW(model.parameters(), rate, betas=(0.9, 0.98), weight_decay=0.01)
    warm = max(1, steps // 20)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimiser,
        lambda s: min((s + 1) / warm, 0.5 + 0.5 * math.cos(math.pi * max(0, s - warm) / max(1, steps - warm))),
    )
    began, recent = perf_counter(), []
    model.train()
    for step in range(steps):
        batch = next(batches)
        logits = model(batch.ids, use_cache=False).logits
        loss = cross_entropy(logits.flatten(0, 1), batch.labels.flatten(), ignore_index=-100)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        schedule.step()
        optimiser.zero_grad(set_to_none=True)
        recent = [*recent[-19:], float(loss.detach())]
        if step % 50 == 49 or step == steps - 1:
            say(f"step {step + 1}/{steps}, loss {sum(recent) / len(recent):.3f}, {perf_counter() - began:.0f} s")
    model.eval()
