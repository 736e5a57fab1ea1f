"""What each head needs: how many of its best keys hold 99 % of the mass, and its error under a plan."""

from __future__ import annotations

from typing import Any

import torch
from experiments.decoders.likelihood import Stretch
from torch import Tensor, nn

import fewkeys as fk
from fewkeys.captures.capture import AttentionInputs
from fewkeys.core.metrics import relative_error
from fewkeys.integrations.interface import attach

MASS = 0.99
SLOTS = (64, 128, 256)
CHUNK = 128


def judge(stretch: Stretch) -> dict[str, Any]:
    """Lists by layer and query head, means over the judged queries. Inputs are those of the exact model.

    needed: how many keys of largest weight hold `MASS` of it, on average; errors: by slots, the mean relative error of
    the head's output under `fk.budget(slots, is_causal=True)`; oracle: the same for each query's best keys.
    """
    measured = _Measured(stretch.first)
    detach = attach(stretch.model, measured).detach
    try:
        with torch.no_grad():
            stretch.model(stretch.tokens, use_cache=False, logits_to_keep=1)
    finally:
        detach()
    return {"needed": measured.needed, "errors": measured.errors, "oracle": measured.oracle}


class _Measured:
    """Answers by exact attention, and records what the heads of each layer need."""

    def __init__(self, first: int) -> None:
        self.first = first
        self.needed: list[list[float]] = []
        self.errors: dict[str, list[list[float]]] = {str(slots): [] for slots in SLOTS}
        self.oracle: dict[str, list[list[float]]] = {str(slots): [] for slots in SLOTS}

    def __call__(self, layer: int, module: nn.Module, inputs: AttentionInputs) -> Tensor:
        rows = (inputs.query, inputs.key, inputs.value)
        exact = fk.attention(*rows, **inputs.options())
        judged = exact[:, :, self.first :]
        for slots in SLOTS:
            plan = fk.budget(slots, is_causal=True).never_exact()
            output = fk.attention(*rows, plan=plan, **inputs.options())
            self.errors[str(slots)].append(_error(output[:, :, self.first :], judged))
        needed, oracle = [], {slots: [] for slots in SLOTS}
        ratio = inputs.query.shape[1] // inputs.key.shape[1]
        key, value = (rows.repeat_interleave(ratio, 1)[0] for rows in (inputs.key, inputs.value))
        for start in range(self.first, key.shape[1], CHUNK):
            query = inputs.query[0, :, start : start + CHUNK] * inputs.scale
            hidden = torch.arange(key.shape[1]) > torch.arange(start, start + query.shape[1])[:, None]
            weights, order = (query @ key.mT).masked_fill(hidden, -torch.inf).softmax(-1).sort(-1, descending=True)
            needed.append((weights.cumsum(-1) < MASS).sum(-1) + 1)
            for slots in SLOTS:
                best = torch.zeros_like(weights).scatter(-1, order[..., :slots], weights[..., :slots])
                oracle[slots].append(best @ value / best.sum(-1, keepdim=True))
        self.needed.append(torch.cat(needed, -1).double().mean(-1).tolist())
        for slots in SLOTS:
            self.oracle[str(slots)].append(_error(torch.cat(oracle[slots], 1)[None], judged))
        return exact


def _error(approx: Tensor, exact: Tensor) -> list[float]:
    """By head, of one sequence."""
    return relative_error(approx, exact)[0].double().mean(-1).tolist()
