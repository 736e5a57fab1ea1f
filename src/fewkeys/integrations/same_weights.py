"""Whether a plan was tuned on this model: by the weights of its attention layers, whatever its name."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fewkeys.model_plan import ModelPlan

SAMPLE, TOLERANCE = 4096, 0.01
"""Numbers read of a weight; the relative difference of norms that still counts as equal, for another dtype."""


def weights_of(modules: Sequence[nn.Module]) -> list[float]:
    """The norm of a sample of the largest weight of each attention module; none where weights are not plain numbers."""
    samples = []
    for module in modules:
        largest = max((part.detach() for part in module.parameters()), key=Tensor.numel, default=torch.empty(0))
        if not largest.is_floating_point() or largest.is_meta or not largest.numel():
            return []
        samples.append(float(largest.flatten()[:: max(1, largest.numel() // SAMPLE)].float().norm()))
    return samples


def check_same_weights(plan: ModelPlan, modules: Sequence[nn.Module]) -> None:
    """Warn if the plan was tuned on other weights."""
    noted: Any = plan.record.get("weights") or []
    present = weights_of(modules) if noted else []
    if len(present) == len(noted) and any(abs(a - b) > TOLERANCE * b for a, b in zip(present, noted, strict=True)):
        warnings.warn(
            f"plan: tuned on {plan.record.get('model')}, and this model's attention has other weights; fewkeys.compare "
            "tells what the plan costs here, or tune it again",
            stacklevel=4,
        )
