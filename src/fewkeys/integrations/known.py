"""Whether a plan was tuned on this model: told by the weights of its attention layers, whatever its name."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fewkeys.model_plan import ModelPlan

SAMPLE, ALIKE = 4096, 0.01
"""Numbers of a weight that are looked at; how far their norm may be from the one noted, for another dtype, say."""


def weights_of(modules: Sequence[nn.Module]) -> list[float]:
    """The norm of a sample of the largest weight of each attention module; none where weights are not plain numbers."""
    found = []
    for module in modules:
        largest = max((part.detach() for part in module.parameters()), key=Tensor.numel, default=torch.empty(0))
        if not largest.is_floating_point() or largest.is_meta or not largest.numel():
            return []
        found.append(float(largest.flatten()[:: max(1, largest.numel() // SAMPLE)].float().norm()))
    return found


def check_known(plan: ModelPlan, modules: Sequence[nn.Module]) -> None:
    """Warn where a plan was tuned on other weights."""
    noted: Any = plan.record.get("weights") or []
    own = weights_of(modules) if noted else []
    if len(own) == len(noted) and any(abs(a - b) > ALIKE * b for a, b in zip(own, noted, strict=True)):
        warnings.warn(
            f"plan: tuned on {plan.record.get('model')}, and this model's attention has other weights; fewkeys.compare "
            "tells what the plan costs here, or tune it again",
            stacklevel=4,
        )
