"""Train a vision transformer with a plan in force, and say how often it is right."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from vit_data import Images, shuffled

import fewkeys as fk

EVALUATED = 250
"""Test images at a time."""


@dataclass(frozen=True)
class Recipe:
    """How every model of a data set is trained: AdamW, the rate rising over a tenth of the steps, then a cosine."""

    epochs: int
    batch: int = 50
    rate: float = 2e-3
    decay: float = 0.05
    clip: float = 1.0


def vit(seed: int, config: Any) -> Any:
    """A fresh classifier, initialised from `seed`; attention dropout is off, since no plan honours it."""
    from transformers import AutoModelForImageClassification

    config = copy.deepcopy(config)
    config.attention_probs_dropout_prob = 0.0
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return AutoModelForImageClassification.from_config(config)


def train(
    model: Any,
    images: Images,
    recipe: Recipe,
    seed: int,
    *,
    plan: fk.Plan | None = None,
    warm: float = 0.0,
    report: Callable[[int, float], None],
) -> dict[str, Any]:
    """Train `model` in place by `plan` (None: full attention), after full attention for a share `warm` of the steps.

    Returns the mean loss of every epoch and the processor time in seconds. `report(epoch, loss)` is told of each.
    """
    device = model.device
    steps = recipe.epochs * max(1, images.size // recipe.batch)
    optimizer = torch.optim.AdamW(model.parameters(), lr=recipe.rate, weight_decay=recipe.decay)
    rise = max(1, steps // 10)
    rate = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / rise, 0.5 + 0.5 * math.cos(math.pi * step / steps))
    )
    order = torch.Generator().manual_seed(seed)
    drawn = torch.Generator(device).manual_seed(seed)
    began, losses = time.process_time(), []
    # 0.07 * 100 is 7.000000000000001 in floating point, and its ceiling would be 8.
    step, warm_steps = 0, math.ceil(warm * steps * (1 - 1e-12))
    model.train()
    with ExitStack() as applied:
        for epoch in range(recipe.epochs):
            total = 0.0
            for pixels, labels in shuffled(images, recipe.batch, order):
                if plan is not None and step == warm_steps:
                    applied.enter_context(fk.apply(model, plan, generator=drawn))
                step += 1
                loss = cross_entropy(model(pixel_values=pixels.to(device)).logits, labels.to(device))
                optimizer.zero_grad()
                loss.backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), recipe.clip)
                optimizer.step()
                rate.step()
                total += float(loss.detach())
            losses.append(total / max(1, images.size // recipe.batch))
            report(epoch + 1, losses[-1])
    model.eval()
    return {"losses": losses, "cpu_seconds": time.process_time() - began}


@torch.no_grad()
def accuracy(model: Any, images: Images, plan: fk.Plan | None, seed: int, index: Tensor | None = None) -> float:
    """The share of images (those at `index`) put in the right class, with attention by `plan` (None: full)."""
    drawn = torch.Generator(model.device).manual_seed(seed)
    index, right = torch.arange(images.size) if index is None else index, 0
    with nullcontext() if plan is None else fk.apply(model, plan, generator=drawn):
        for part in index.split(EVALUATED):
            pixels, labels = images.load(part)
            logits = model(pixel_values=pixels.to(model.device)).logits
            right += int((logits.argmax(-1).cpu() == labels).sum())
    return right / len(index)
