"""Switch selection on in a trained model: accuracy, and how much of its softmax mass the kept keys hold."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from vit_data import Images
from vit_plans import PLANS
from vit_train import accuracy

import fewkeys as fk
from fewkeys.captures import Capture

STUDIED, AT_A_TIME = 128, 64
"""Test images whose attention is captured for the mass, and how many at a time."""
ORACLE_TESTED = 500
"""Test images that an oracle is tried on: it scores every pair and sorts, many times slower than the other rows."""


def masses(capture: Capture, plan: fk.Plan, seed: int) -> dict[str, list[float]]:
    """Per layer, the mean share of the exact softmax weight that lies on the kept keys: all queries, and query 0.

    Query 0 is the class token, the only one that the classifier reads after the last layer.
    """
    drawn = torch.Generator().manual_seed(seed)
    found: dict[str, list[float]] = {"mass": [], "class_token_mass": []}
    for layer in range(capture.layers):
        shares: list[Tensor] = []
        for call in capture.calls(layer):
            weights = (call.query @ call.key.mT * call.scale).softmax(-1)
            graph = plan.keep.graph(call.query, call.key, call.value, scale=call.scale, generator=drawn)
            shares.append(fk.metrics.mass(weights, graph.to_mask()))
        found["mass"].append(float(torch.cat(shares).mean()))
        found["class_token_mass"].append(float(torch.cat(shares)[..., 0].mean()))
    return found


def inference(
    model: Any, images: Images, counts: Sequence[int], seed: int, report: Callable[[str], None]
) -> list[dict[str, Any]]:
    """A row for every plan and count that leaves out a key: accuracy and captured mass per layer."""
    order = torch.randperm(images.size, generator=torch.Generator().manual_seed(seed))
    capture = fk.capture(model, [images.load(part)[0] for part in order[:STUDIED].split(AT_A_TIME)])
    tokens = next(capture.calls(0)).key.shape[2]
    rows = []
    for k in counts:
        if k >= tokens:
            continue  # every key is kept: full attention
        for name, make in PLANS.items():
            report(f"{name} {k}")
            plan = make(k)
            tested = order[:ORACLE_TESTED] if plan.keep is not None and plan.keep.is_oracle else order
            right = accuracy(model, images, plan, seed, tested)
            rows.append(
                {"selector": name, "k": k, "accuracy": right, "images": len(tested), **masses(capture, plan, seed)}
            )
    return rows
