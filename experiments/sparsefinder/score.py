"""Recall and sparsity of every family, value and window on a capture."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from experiments.sparsefinder.methods import WINDOWS, Family
from torch import Tensor

import fewkeys as fk
from fewkeys.captures.capture import Capture
from fewkeys.core import metrics
from fewkeys.core.graph import visible
from fewkeys.core.inputs import Inputs
from fewkeys.papers import sparsefinder
from fewkeys.tuning.score import problem_of


@dataclass(frozen=True)
class Point:
    """One value of a family with one window: means over layers, heads and sequences.

    recall: share of the gold edges that are kept. sparsity: share of the visible pairs that are not kept. exact: share
    of the queries all of whose gold edges are kept.
    """

    family: str
    kind: str
    value: str
    window: int
    recall: float
    sparsity: float
    exact: float


def score(
    capture: Capture, families: Mapping[str, Family], alpha: float, progress: Callable[[int, int], None]
) -> list[Point]:
    """Every point. `capture` holds unpadded sequences only, so that batches can be judged whole.

    `progress(done, of)` counts layers. Raises `ValueError` for padded captures.
    """
    sums: dict[tuple[str, int, int], Tensor] = {}
    sequences = 0
    for layer in range(capture.layers):
        selectors = {
            (name, at): family.make(layer, value)
            for name, family in families.items()
            for at, value in enumerate(family.values)
        }
        for number, call in enumerate(capture.calls(layer)):
            if any(mask is not None and not mask.all() for mask in (call.key_mask, call.query_mask)):
                raise ValueError("capture: expected sequences without padding, got some; batch sequences of one length")
            x = problem_of(call, number)
            gold = sparsefinder.EntmaxSupport(alpha).select(x).to_mask()
            near = {window: _near(x, window) for window in WINDOWS}
            seen = visible(x, 0, x.queries).expand_as(gold).sum((-2, -1))
            for (name, at), selector in selectors.items():
                found = None if selector is None else selector.select(problem_of(call, number)).to_mask()
                for window, band in near.items():
                    mask = band.expand_as(gold) if found is None else found | band
                    scores = (
                        metrics.recall(mask, gold),
                        1 - mask.sum((-2, -1)) / seen,
                        metrics.exact_fraction(mask, gold),
                    )
                    row = torch.stack([value.double().mean(1).sum() for value in scores])
                    sums[name, at, window] = sums.get((name, at, window), 0) + row
            sequences += len(gold) if layer == 0 else 0
        progress(layer + 1, capture.layers)
    total = sequences * capture.layers
    return [
        Point(name, families[name].kind, str(families[name].values[at]), window, *(row / total).tolist())
        for (name, at, window), row in sums.items()
    ]


def _near(x: Inputs, window: int) -> Tensor:
    if window == 0:
        return torch.zeros(1, 1, x.queries, x.keys, dtype=torch.bool)
    return fk.Window(window).select(x).to_mask()[:1, :1]


def front(points: list[Point]) -> list[Point]:
    """Those that no other beats in both recall and sparsity; by falling sparsity."""
    kept: list[Point] = []
    for point in sorted(points, key=lambda point: (-point.sparsity, -point.recall)):
        if not kept or point.recall > kept[-1].recall:
            kept.append(point)
    return kept


def fronts(points: list[Point]) -> list[Point]:
    """The front of every family."""
    names = dict.fromkeys(point.family for point in points)
    return [point for name in names for point in front([own for own in points if own.family == name])]


def sparsest(points: list[Point], recall: float) -> Point | None:
    """The sparsest of at least such a recall, None where there is none."""
    return max((point for point in points if point.recall >= recall), key=lambda point: point.sparsity, default=None)
