"""The error of a plan on live input, estimated from a few queries answered exactly, with an interval."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Unpack

import torch
from torch import Tensor

from fewkeys.core.inputs import Inputs
from fewkeys.core.validation import Options, check_count, check_real
from fewkeys.flow import by_plan, check_plan, checked, choose, run
from fewkeys.guard.fallback import QUERIES
from fewkeys.guard.interval import pool
from fewkeys.guard.sample import Estimates, draw, sampled_errors
from fewkeys.plan import Plan


@dataclass(frozen=True)
class SpotCheck:
    """An estimate of a plan's mean relative output error, `|o~ - o| / |o|` over sequences, heads and queries.

    Attributes:
        error: the estimate, unbiased.
        low, high: the interval that contains the mean over all queries with probability `confidence`.
        queries: how many queries were computed exactly (each head of each sequence has its own); none for heads whose
            plan is exact attention on such input.
        of: how many there are. If `queries` equals `of`, error, low and high are the error itself.
        per_head: the estimate of each query head; empty for a whole model.
        per_layer: the result of each layer of a whole model.
    """

    error: float
    low: float
    high: float
    confidence: float
    queries: int
    of: int
    per_head: tuple[float, ...] = ()
    per_layer: tuple[SpotCheck, ...] = ()

    def __str__(self) -> str:
        interval = f"{100 * self.confidence:g} % interval {self.low:.3g} to {self.high:.3g}"
        text = f"error {self.error:.3g}, {interval}, from {self.queries:,} of {self.of:,} queries"
        return "\n".join([text, *(f"  layer {i}: {layer}" for i, layer in enumerate(self.per_layer))])


def check_tensors(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    plan: Plan | Sequence[Plan],
    *,
    queries: int = QUERIES,
    confidence: float = 0.95,
    **options: Unpack[Options],
) -> SpotCheck:
    """`fewkeys.spot_check` of one attention call."""
    check_options(queries, confidence)
    check_plan(plan)
    inputs = checked(query, key, value, **options)
    return summary(check_call(inputs, plan, queries, inputs.generator), confidence)


def check_options(queries: int, confidence: float) -> None:
    """Raise for fewer than two queries, which have no variance, or a confidence outside (0, 1)."""
    check_count("queries", queries, least=2)
    check_real("confidence", confidence, above=0.0, below=1.0)


@torch.no_grad()
def check_call(
    inputs: Inputs, plan: Plan | Sequence[Plan], queries: int, generator: torch.Generator | None
) -> list[Estimates]:
    """The estimates of one attention call, for each distinct plan of its heads."""
    estimates = []
    for part_plan, heads, part in by_plan(inputs, plan):
        choice = choose(part_plan.never_exact(), part)
        if choice.is_exact:
            sample = draw(part, torch.zeros(queries, device=part.query.device))
            exact = sample.estimates(torch.zeros_like(sample.index, dtype=torch.float64), heads)
            estimates.append(replace(exact, drawn=torch.zeros_like(exact.drawn)))
        else:
            shape = (part.batch, part.query_heads, queries)
            sample, errors = sampled_errors(part, part_plan.weights, run(choice), shape, generator)
            estimates.append(sample.estimates(errors, heads))
    return estimates


def summary(checks: Sequence[Estimates], confidence: float) -> SpotCheck:
    """The result of the calls of one layer."""
    heads, count, mean = (torch.cat([getattr(check, name) for check in checks]) for name in ("heads", "count", "mean"))
    total, queries = (heads.bincount(numbers) for numbers in (count * mean, count))
    return _pooled(checks, confidence, per_head=tuple((total / queries.clamp_min(1)).tolist()))


def overall(checks: Sequence[Sequence[Estimates]], confidence: float) -> SpotCheck:
    """The result of all layers, given the calls of each."""
    layers = tuple(summary(calls, confidence) for calls in checks)
    return _pooled([call for calls in checks for call in calls], confidence, per_layer=layers)


def _pooled(checks: Sequence[Estimates], confidence: float, **parts: Any) -> SpotCheck:
    drawn, of = (sum(int(getattr(check, name).sum()) for check in checks) for name in ("drawn", "count"))
    return SpotCheck(*pool(checks, confidence), confidence, drawn, of, **parts)
