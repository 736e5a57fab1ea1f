"""The effect on the whole model: how far its last hidden states move when every layer attends by a plan."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity

from fewkeys.core.impl import Impl
from fewkeys.integrations.interface import unwrapped
from fewkeys.integrations.transformers import apply
from fewkeys.judge.result import Effect
from fewkeys.model_plan import ModelPlan
from fewkeys.plan import Plan

Batch = Tensor | Mapping[str, Tensor]


def effects(
    model: Any,
    batches: Iterable[Batch],
    plans: Sequence[Plan | ModelPlan],
    *,
    impl: Impl = "auto",
    generator: Callable[[int], torch.Generator],
    done: Callable[[int], None],
) -> list[Effect]:
    """The effect of each plan on `model` over `batches` of token ids (or mappings with an attention mask).

    Costs one forward pass per batch and plan, and one exact one per batch; keeps the hidden states of one batch.
    `impl` is that of `fewkeys.apply`, `generator(i)` gives plan i its randomness, `done(sequences)` is called after
    each pass.
    """
    model = unwrapped(model)
    pooled: list[list[Tensor]] = [[] for _ in plans]
    tokens = torch.zeros(len(plans), dtype=torch.float64, device="cpu")
    count = 0
    generators = [generator(i) for i in range(len(plans))]
    for batch in batches:
        states, mask = _states(model, batch)
        count += int(mask.sum())
        done(len(states))
        for i, plan in enumerate(plans):
            with apply(model, plan.never_exact(), impl=impl, generator=generators[i]):
                other, _ = _states(model, batch)
            pooled[i].append(cosine_similarity(_mean(states, mask), _mean(other, mask), dim=-1).cpu())
            tokens[i] += cosine_similarity(states[mask].double(), other[mask].double(), dim=-1).sum().cpu()
            done(len(states))
    if count == 0:
        raise ValueError("batches: expected at least one batch with a valid token, got none; pass the captured batches")
    return [
        Effect(float(torch.cat(p).mean()), float(torch.cat(p).min()), float(t / count))
        for p, t in zip(pooled, tokens, strict=True)
    ]


def _states(model: Any, batch: Batch) -> tuple[Tensor, Tensor]:
    """Last hidden states (B, N, H) in float32 and which tokens are valid (B, N)."""
    inputs = dict(batch) if isinstance(batch, Mapping) else {"input_ids": batch}
    inputs = {name: value.to(model.device) for name, value in inputs.items()}
    base = model.base_model  # without the head that predicts words
    extra = {"use_cache": False} if "use_cache" in inspect.signature(base.forward).parameters else {}
    with torch.no_grad():
        states: Tensor = base(**inputs, **extra).last_hidden_state.float()
    mask = inputs.get("attention_mask")
    valid = torch.ones(states.shape[:2], dtype=torch.bool, device=states.device) if mask is None else mask.bool()
    return states, valid


def _mean(states: Tensor, mask: Tensor) -> Tensor:
    """Mean over valid tokens (B, H), in float64: cosines near 1 are the ones that matter."""
    weight = mask.double().unsqueeze(-1)
    return (states * weight).sum(1) / weight.sum(1).clamp_min(1.0)
