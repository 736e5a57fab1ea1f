"""Arithmetic of exact attention and of plans, operations per query: a model, not a measurement."""

from __future__ import annotations

from fewkeys.core.inputs import Inputs
from fewkeys.execute.torch.by_block import block_size
from fewkeys.plan import Plan
from fewkeys.rest import ClusterMeans, GroupMeans, Moments
from fewkeys.select import Leverage, Outliers, Selector, TopK, Union, Window
from fewkeys.select.top_k import BestColumns
from fewkeys.sketch.clusters import KEYS_PER_CLUSTER, LLOYD_STEPS

PER_SCORE = 20
"""Operations that turn one score into a weight, counted like multiplications and additions."""


def exact_operations(inputs: Inputs) -> float:
    """Operations per query of exact attention."""
    seen = inputs.keys * (0.5 if inputs.is_causal and not inputs.offset else 1.0)
    return seen * _per_key(inputs)


def plan_operations(inputs: Inputs, plan: Plan) -> float:
    """Operations per query of selecting, summarising and attending."""
    x = inputs
    if plan.keep is None:
        return exact_operations(x)
    parts = plan.keep.parts if isinstance(plan.keep, Union) else (plan.keep,)
    width, means = sum(_width(x, part) for part in parts), plan.rest.slots(x.head_dim, x.value_dim)
    # Preparing costs per key; there are so many keys per query of one key head's group.
    share = x.keys / (x.queries * x.groups)
    prepare = sum(_select_operations(x, part) for part in parts) * share
    if isinstance(plan.rest, ClusterMeans):
        prepare += (cluster_operations(x, plan.rest.count) + 2 * x.head_dim * x.value_dim) * share
        banded = any(isinstance(part, Window) for part in parts)
        means += 2 * plan.rest.count * width / _per_key(x) if banded else 0
    if isinstance(plan.rest, GroupMeans):
        prepare += 2 * (x.head_dim + x.value_dim) * share
    if isinstance(plan.rest, Moments):
        prepare += 2 * x.head_dim * (x.head_dim + x.value_dim) * share
    return (width + means) * _per_key(x) + prepare


def cluster_operations(inputs: Inputs, count: int) -> float:
    """Operations per key of clustering: Lloyd's steps on a sample, one assignment and the sums over all keys."""
    used = min(1.0, KEYS_PER_CLUSTER * count / inputs.keys)
    return (LLOYD_STEPS * used + 1) * 4 * count * (inputs.head_dim + inputs.value_dim)


def _per_key(inputs: Inputs) -> float:
    return 2 * (inputs.head_dim + inputs.value_dim) + PER_SCORE


def _width(inputs: Inputs, part: Selector) -> float:
    """Scores per query that a selector's keys cost."""
    work = part.expected_work(inputs)
    if work is not None:
        return work[0]
    if isinstance(part, Window):
        graph = part.select(inputs)
        return block_size(graph) + sum(graph.band or (0, 0))
    if isinstance(part, Leverage) and part.eps is not None:
        return inputs.head_dim / part.eps
    return float(getattr(part, "count", 0))


def _select_operations(inputs: Inputs, part: Selector) -> float:
    """Operations per key of choosing. The clusters of `Outliers` are those of the rest, counted there."""
    work = part.expected_work(inputs)
    if work is not None:
        return work[1]
    if isinstance(part, TopK | BestColumns):
        return 2.0 * inputs.head_dim * inputs.queries * inputs.groups
    if isinstance(part, Leverage | Outliers):
        return 4.0 * inputs.head_dim**2
    return 0.0
