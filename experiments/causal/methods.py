"""What a cache of so many slots keeps, by method: fewkeys' plan, its peers and the controls."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from experiments.causal.eviction import attention_so_far, held
from torch import Tensor, nn

import fewkeys as fk
from fewkeys.captures.capture import AttentionInputs
from fewkeys.integrations.interface import attach

SINKS = 4
PLANS: dict[str, Callable[[int], fk.Plan]] = {
    "fewkeys": lambda slots: fk.budget(slots, is_causal=True, memory="constant"),
    "fewkeys + sinks": lambda slots: _with_sinks(fk.budget(slots - SINKS, is_causal=True, memory="constant")),
    "sinks + window": lambda slots: fk.Plan(fk.Sinks(SINKS) | fk.Window(slots - SINKS)),
    "leverage": lambda slots: fk.Plan(fk.select.Leverage(slots // 2, centre=True) | fk.Window(slots // 2)),
    "key norm": lambda slots: fk.Plan(fk.select.KeyNorm(slots // 2) | fk.Window(slots // 2)),
    "random": lambda slots: fk.Plan(fk.RandomKeys(slots // 2) | fk.Window(slots // 2)),
}
"""Half of the slots are a window where a method chooses keys of the past: without one, none of them works at all."""
ACCUMULATED = "accumulated attention"
METHODS = ("exact", *PLANS, ACCUMULATED)


def _with_sinks(plan: fk.Plan) -> fk.Plan:
    if plan.keep is None:
        raise ValueError("slots: expected more than the sinks")
    return fk.Plan(fk.Sinks(SINKS) | plan.keep, plan.rest, plan.weights)


@contextmanager
def replaced(model: Any, method: str, slots: int) -> Iterator[None]:
    """The model with the attention of every layer replaced."""
    if method == "exact":
        yield
    elif method == ACCUMULATED:
        detach = attach(model, _Accumulated(slots)).detach
        try:
            yield
        finally:
            detach()
    else:
        with fk.apply(model, PLANS[method](slots).never_exact()):
            yield


class _Accumulated:
    """Heavy-hitter eviction: half of the slots are the latest keys, half those of most attention so far."""

    def __init__(self, slots: int) -> None:
        self.slots = slots

    def __call__(self, layer: int, module: nn.Module, inputs: AttentionInputs) -> Tensor:
        query, key, value = inputs.query * inputs.scale, inputs.key, inputs.value
        own = query.unflatten(1, (key.shape[1], -1))
        outputs = []
        for now, place in enumerate(held(query, key, self.slots, attention_so_far)):
            index = place.clamp_min(0).unsqueeze(-1)
            k = key.gather(2, index.expand(-1, -1, -1, key.shape[-1]))
            v = value.gather(2, index.expand(-1, -1, -1, value.shape[-1]))
            scores = (own[:, :, :, now] @ k.mT).masked_fill((place < 0).unsqueeze(2), -torch.inf)
            outputs.append(scores.softmax(-1) @ v)
        return torch.stack(outputs, 3).flatten(1, 2)
