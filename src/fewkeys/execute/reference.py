"""The definition of a plan, on dense matrices: what every test compares with.

Every query is scored against every key under the graph's mask. Stand-ins are further columns. The multiplicity of a
stand-in is counted from the mask. float32, or float64 for float64 input, whatever the other dtypes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import one_hot, pad

from fewkeys.core.distances import logarithm
from fewkeys.core.graph import Graph, cohort_of_queries
from fewkeys.core.inputs import Inputs
from fewkeys.core.precision import working
from fewkeys.core.rows import take
from fewkeys.core.weights import Softmax, Weights, positive
from fewkeys.execute.problem import SCORES_AT_ONCE, Problem
from fewkeys.rest.base import BlockStandIns, CohortStandIns, RangeStandIns, within_reach


def unsupported(problem: Problem) -> None:
    """Nothing: it is the definition."""


def attend(problem: Problem) -> Tensor:
    """The output (B, Hq, Nq, Dv). Cost O(n^2 (D + Dv)), memory O(n^2) per query head."""
    return _attend(problem, 0, problem.inputs.queries).to(problem.inputs.query.dtype)


def attend_in_pieces(problem: Problem) -> Tensor:
    """The same, some queries at a time: memory O(n (D + Dv)). For graphs that no other executor supports."""
    x = problem.inputs
    step = max(1, SCORES_AT_ONCE // (x.batch * x.query_heads * x.keys))
    pieces = [_attend(problem, start, min(start + step, x.queries)) for start in range(0, x.queries, step)]
    return torch.cat(pieces, 2).to(x.query.dtype)


def _attend(problem: Problem, start: int, stop: int) -> Tensor:
    """The output of queries start .. stop - 1, in working precision."""
    inputs, graph, stand_ins, weights = problem.inputs, problem.graph, problem.stand_ins, problem.weights

    def per_query_head(tensor: Tensor) -> Tensor:
        return working(tensor).repeat_interleave(inputs.gqa_ratio, 1)

    query = working(inputs.query[:, :, start:stop]) * inputs.scale
    kept, scores = graph.mask(start, stop), query @ per_query_head(inputs.key).mT
    bias = None
    if inputs.bias is not None:
        bias = inputs.bias.of(start + inputs.offset, stop + inputs.offset, inputs.keys)
        scores = scores + bias
    scores = scores.masked_fill(~kept, -torch.inf)
    value = per_query_head(inputs.value)
    if stand_ins is None:
        (weight,) = weights.kernel([scores])
        return (weight @ value) / positive(weight.sum(-1, keepdim=True))
    if isinstance(stand_ins, BlockStandIns):
        first = torch.zeros(stop - start, dtype=torch.int64, device=query.device)
        block = first if graph.columns is None else graph.columns.block(inputs, start, stop)
        parts = (stand_ins.key, stand_ins.value, stand_ins.bias, stand_ins.size)
        return _beside_means(query, scores, value, [per_query_head(part)[:, :, block] for part in parts], weights)

    if isinstance(stand_ins, CohortStandIns):
        return _beside_cohort_means(problem, stand_ins, start, query, kept, scores, bias)
    if isinstance(stand_ins, RangeStandIns):
        step = stand_ins.step(inputs, start, stop)
        key, mean = (per_query_head(part)[:, :, step] for part in (stand_ins.key, stand_ins.value))
        before = pad(kept.to(query.dtype).cumsum(-1), (1, 0))
        held = before.gather(-1, stand_ins.edges[step].expand(*before.shape[:3], -1)).diff(dim=-1)
        left = working(stand_ins.size)[:, None, step] - held
        extra = (query.unsqueeze(-2) @ key.mT).squeeze(-2).masked_fill(left <= 0, -torch.inf)
        weight, weight_extra = weights.kernel([scores, extra])
        weight_extra = weight_extra * left
        total = weight.sum(-1, keepdim=True) + weight_extra.sum(-1, keepdim=True)
        return (weight @ value + (weight_extra.unsqueeze(-2) @ mean).squeeze(-2)) / positive(total)
    extra = query @ per_query_head(stand_ins.key).mT
    if stand_ins.bias is not None:
        extra = extra + per_query_head(stand_ins.bias).unsqueeze(-2)
    if inputs.bias is not None and bias is not None:
        largest = inputs.bias.largest[:, None, None]
        mass = ((~kept) * (bias - largest).exp()) @ per_query_head(stand_ins.member)
        extra, multiplicity = extra + largest + logarithm(mass), (mass > 0).to(mass.dtype)
    else:
        multiplicity = (~kept).to(query.dtype) @ per_query_head(stand_ins.member)
    extra = extra.masked_fill(multiplicity <= 0, -torch.inf)
    weight, weight_extra = weights.kernel([scores, extra])
    weight_extra = weight_extra * multiplicity
    total = weight.sum(-1, keepdim=True) + weight_extra.sum(-1, keepdim=True)
    output = weight @ value + weight_extra @ per_query_head(stand_ins.value)
    if stand_ins.left is not None and stand_ins.factor is not None:
        moved = query @ per_query_head(stand_ins.left)
        if stand_ins.bounds is not None:
            moved = within_reach(moved, per_query_head(stand_ins.bounds))
        if stand_ins.right is not None:
            moved = moved @ per_query_head(stand_ins.right)
        output = output + (weight_extra @ per_query_head(stand_ins.factor).unsqueeze(-1)) * moved
    return output / positive(total)


def _beside_means(query: Tensor, scores: Tensor, value: Tensor, means: Sequence[Tensor], weights: Weights) -> Tensor:
    """Kept keys beside each query's own stand-ins of the past: their keys, values, biases and sizes."""
    key, mean, bias, size = means
    extra = (query.unsqueeze(-2) @ key.mT).squeeze(-2)
    tilted = isinstance(weights, Softmax)
    extra = (extra + bias if tilted else extra).masked_fill(size == 0, -torch.inf)
    weight, weight_extra = weights.kernel([scores, extra])
    weight_extra = weight_extra if tilted else weight_extra * size
    total = weight.sum(-1, keepdim=True) + weight_extra.sum(-1, keepdim=True)
    return (weight @ value + (weight_extra.unsqueeze(-2) @ mean).squeeze(-2)) / positive(total)


def _beside_cohort_means(
    problem: Problem,
    stand_ins: CohortStandIns,
    start: int,
    query: Tensor,
    kept: Tensor,
    scores: Tensor,
    bias: Tensor | None,
) -> Tensor:
    """Kept keys beside the stand-ins of each query's cohort; queries of no cohort see nothing."""
    x, columns = problem.inputs, problem.graph.columns
    if columns is None or columns.place is None:
        raise ValueError("graph: expected the lists of cohorts beside their stand-ins, got others")
    cohort = cohort_of_queries(x, columns.place)[:, :, start : start + query.shape[2]]

    def per_query_head(tensor: Tensor) -> Tensor:
        return working(tensor).repeat_interleave(x.gqa_ratio, 1)

    def per_query(tensor: Tensor) -> Tensor:
        rows = take(per_query_head(tensor).flatten(3), cohort.clamp_min(0))
        by_query: Tensor = rows.unflatten(-1, tensor.shape[3:])
        return by_query

    real = torch.ones_like(kept[:1, :1, :1]) if x.valid is None else x.valid[:, None, None]
    cluster = one_hot(stand_ins.label, stand_ins.count).to(query.dtype).repeat_interleave(x.gqa_ratio, 1)
    unkept = (real & ~kept).to(query.dtype)
    extra = (per_query(stand_ins.key) @ query.unsqueeze(-1)).squeeze(-1) + per_query(stand_ins.bias)
    if x.bias is not None and bias is not None:
        largest = x.bias.largest[:, None, None]
        unkept, extra = unkept * (bias - largest).exp(), extra + largest
    spoken_for = unkept @ cluster / per_query(stand_ins.size).clamp_min(1)
    extra = extra + logarithm(per_query(stand_ins.mass) * spoken_for)
    weight, weight_extra = problem.weights.kernel([scores, extra.masked_fill((cohort < 0).unsqueeze(-1), -torch.inf)])
    total = weight.sum(-1, keepdim=True) + weight_extra.sum(-1, keepdim=True)
    output = weight @ per_query_head(x.value) + (weight_extra.unsqueeze(-2) @ per_query(stand_ins.value)).squeeze(-2)
    s = stand_ins
    if s.left is not None and s.right is not None and s.factor is not None and s.bounds is not None:
        along = within_reach(query.unsqueeze(-2) @ per_query(s.left), per_query(s.bounds))
        moved = (along @ per_query(s.right)).squeeze(-2)
        output = output + (weight_extra * per_query(s.factor)).sum(-1, keepdim=True) * moved
    return output / positive(total)


def attend_exact(inputs: Inputs, weights: Weights) -> Tensor:
    """Every query attends to every key it may see."""
    return attend(Problem(inputs, Graph(inputs, full=True), None, weights))
