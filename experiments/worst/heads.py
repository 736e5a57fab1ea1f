"""The worst heads of trained models: each plan is run on the queries, keys and values of all heads."""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn

import fewkeys as fk
from fewkeys.captures.capture import AttentionInputs
from fewkeys.integrations.interface import attach
from fewkeys.metrics import relative_error

KEPT = 3
"""The worst heads that are examined closely."""


@dataclass
class Heads:
    """Errors of heads by plan, and the calls of those with the largest."""

    plans: dict[str, fk.Plan]
    errors: dict[str, list[float]] = field(default_factory=dict)
    worst: dict[str, list[tuple[float, int, str, AttentionInputs]]] = field(default_factory=dict)
    _order: Any = field(default_factory=count)

    def read(self, model: nn.Module, title: str, **batch: Tensor) -> None:
        """Run the model on a batch and note every head's mean error over queries and sequences."""

        def answer(layer: int, module: nn.Module, inputs: AttentionInputs) -> Tensor:
            exact = fk.attention(inputs.query, inputs.key, inputs.value, **inputs.options())
            for name, plan in self.plans.items():
                output = fk.attention(inputs.query, inputs.key, inputs.value, plan=plan, **inputs.options())
                for head, error in enumerate(relative_error(output, exact).mean((0, 2)).tolist()):
                    self._note(name, error, f"{title}, layer {layer}, head {head}", head, inputs)
            return exact

        detach = attach(model, answer).detach
        try:
            with torch.no_grad():
                model(**batch)
        finally:
            detach()

    def _note(self, name: str, error: float, title: str, head: int, inputs: AttentionInputs) -> None:
        self.errors.setdefault(name, []).append(error)
        worst = self.worst.setdefault(name, [])
        if len(worst) < KEPT or error > worst[0][0]:
            kv_head = head * inputs.key.shape[1] // inputs.query.shape[1]
            query, part = inputs.query[:, head : head + 1].clone(), slice(kv_head, kv_head + 1)
            alone = replace(inputs, query=query, key=inputs.key[:, part].clone(), value=inputs.value[:, part].clone())
            heapq.heappush(worst, (error, next(self._order), title, alone))
            if len(worst) > KEPT:
                heapq.heappop(worst)
