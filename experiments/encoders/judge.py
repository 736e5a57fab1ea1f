"""The error of plans on captured attention: the same sample of queries of every head, and exact answers to them."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

import fewkeys as fk
from fewkeys.captures import Capture
from fewkeys.captures.capture import AttentionInputs
from fewkeys.core.distances import DistanceBias
from fewkeys.core.metrics import relative_error

SAMPLE = 64
"""Queries of a head that are judged. Plans are prepared for all queries and answer them all."""


@dataclass(frozen=True, eq=False)
class Problem:
    """Layers and sequences side by side in one batch: `call.query` is (layers x sequences, H, N, D).

    `sample` (Q,): the places of the queries that are judged; `scores` (B, H, Q, N) and `exact` (B, H, Q, Dv): theirs.
    """

    call: AttentionInputs
    layers: int
    sample: Tensor
    scores: Tensor
    exact: Tensor


def problem(capture: Capture, layers: tuple[int, ...]) -> Problem:
    """The first calls of these layers as one problem."""
    calls = [next(iter(capture.calls(layer))) for layer in layers]
    query, key, value = (torch.cat([getattr(call, name) for call in calls]) for name in ("query", "key", "value"))
    table = calls[0].distance_bias
    if table is not None and not all(torch.equal(table, call.distance_bias) for call in calls):
        raise ValueError("capture: expected one bias of the distance for all layers, got several")
    count = query.shape[2]
    sample = torch.randperm(count, generator=torch.Generator().manual_seed(0))[:SAMPLE].sort().values
    scores = calls[0].scale * query[:, :, sample] @ key.mT
    if table is not None:
        scores += DistanceBias(table).of(0, count, count)[:, sample]
    call = replace(calls[0], query=query, key=key, value=value)
    return Problem(call, len(layers), sample, scores, scores.softmax(-1) @ value)


def judged(x: Problem, output: Tensor) -> tuple[float, float]:
    """The mean of `|o - exact| / |exact|` over queries, sequences and heads, and the largest mean of one head.

    output: (B, H, Q, Dv), the answers to the sample.
    """
    by_head = relative_error(output, x.exact).mean(-1).unflatten(0, (x.layers, -1)).mean(1)
    return float(by_head.mean()), float(by_head.max())


def error(x: Problem, plan: fk.Plan) -> tuple[float, float]:
    """The two errors of `judged`, of a plan."""
    call, draw = x.call, torch.Generator().manual_seed(0)
    output = fk.attention(call.query, call.key, call.value, plan=plan, **call.options(draw))
    return judged(x, output[:, :, x.sample])


def best_keys(x: Problem, slots: int) -> tuple[float, float]:
    """The two errors of `judged`, of each query's best keys alone. All scores are computed to find them: a bound for
    plans that only keep keys.
    """
    least = x.scores.topk(slots, -1).values[..., -1:]
    return judged(x, x.scores.masked_fill(x.scores < least, -torch.inf).softmax(-1) @ x.call.value)
