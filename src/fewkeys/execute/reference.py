"""The definition of a plan, on dense matrices in working precision: what every test compares with.

Every query is scored against every key under the graph's mask. Stand-ins are further columns.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import one_hot, pad

from fewkeys.core.distances import logarithm
from fewkeys.core.graph import cohort_of_queries, query_blocks
from fewkeys.core.inputs import Inputs
from fewkeys.core.precision import working
from fewkeys.core.rows import take
from fewkeys.core.weights import Softmax, positive
from fewkeys.execute.problem import Problem
from fewkeys.rest.base import AnyStandIns, BlockStandIns, CohortStandIns, RangeStandIns, StandIns, value_shift


def unsupported(problem: Problem) -> None:
    """Nothing: it is the definition."""


def attend(problem: Problem) -> Tensor:
    """The output (B, Hq, Nq, Dv). Cost O(n^2 (D + Dv)), memory O(n^2) per query head."""
    return _attend(problem, 0, problem.inputs.queries).to(problem.inputs.query.dtype)


def attend_in_pieces(problem: Problem) -> Tensor:
    """The output, some queries at a time: memory O(n (D + Dv)). For graphs that no other executor supports."""
    x = problem.inputs
    return torch.cat([_attend(problem, start, stop) for start, stop in query_blocks(x)], 2).to(x.query.dtype)


def _attend(problem: Problem, start: int, stop: int) -> Tensor:
    """The output of queries start .. stop - 1."""
    x, s, kernel = problem.inputs, problem.stand_ins, problem.weights.kernel
    query, kept = working(x.query[:, :, start:stop]) * x.scale, problem.graph.mask(start, stop)
    key, value = _by_query_head(x, x.key), _by_query_head(x, x.value)
    bias = None if x.bias is None else x.bias.of(start + x.offset, stop + x.offset, x.keys)
    scores = query @ key.mT if bias is None else query @ key.mT + bias
    scores = scores.masked_fill(~kept, -torch.inf)
    if s is None:
        (weight,) = kernel([scores])
        return (weight @ value) / positive(weight.sum(-1, keepdim=True))
    extra, multiplicity, mean, shift = _columns(problem, s, _Rows(start, stop, query, kept, bias))
    weight, weight_extra = kernel([scores, extra.masked_fill(multiplicity <= 0, -torch.inf)])
    weight_extra = weight_extra * multiplicity
    total = weight.sum(-1, keepdim=True) + weight_extra.sum(-1, keepdim=True)
    mixed = weight_extra @ mean if mean.ndim == 4 else (weight_extra.unsqueeze(-2) @ mean).squeeze(-2)
    if shift is not None:
        mixed = mixed[..., :-1] + mixed[..., -1:] * shift
    return (weight @ value + mixed) / positive(total)


class _Rows(NamedTuple):
    """Scaled queries start .. stop - 1, the mask of the keys that they keep, and the biases of their scores."""

    start: int
    stop: int
    query: Tensor
    kept: Tensor
    bias: Tensor | None


_Columns = tuple[Tensor, Tensor, Tensor, Tensor | None]
"""What stand-ins add to M rows: scores and multiplicities (B, Hq, M, C); values (B, Hq, C, Dv), or each query's own,
(B, Hq, M, C, Dv); the first-order term (B, Hq, M, Dv), whose factors are then a last column of the values.
"""


def _columns(problem: Problem, stand_ins: AnyStandIns, rows: _Rows) -> _Columns:
    if isinstance(stand_ins, StandIns):
        return _shared(problem.inputs, stand_ins, rows)
    if isinstance(stand_ins, CohortStandIns):
        return _of_cohorts(problem, stand_ins, rows)
    if isinstance(stand_ins, RangeStandIns):
        return _of_ranges(problem.inputs, stand_ins, rows)
    return _of_blocks(problem, stand_ins, rows)


def _shared(x: Inputs, stand_ins: StandIns, rows: _Rows) -> _Columns:
    """Stand-ins for all queries of a key head."""
    query, kept, s = rows.query, rows.kept, stand_ins.changed(lambda part: _by_query_head(x, part))
    scores = query @ s.key.mT
    if s.bias is not None:
        scores = scores + s.bias.unsqueeze(-2)
    if s.curvature is not None:
        scores = scores + 0.5 * ((query @ s.curvature) * query).sum(-1, keepdim=True)
    if x.bias is not None and rows.bias is not None:
        largest = x.bias.largest[:, None, None]
        mass = ((~kept) * (rows.bias - largest).exp()) @ s.member
        scores, multiplicity = scores + largest + logarithm(mass), (mass > 0).to(mass.dtype)
    else:
        multiplicity = (~kept).to(query.dtype) @ s.member
    if s.left is None or s.factor is None:
        return scores, multiplicity, s.value, None
    value = torch.cat([s.value, s.factor.unsqueeze(-1)], -1)
    return scores, multiplicity, value, value_shift(query, s.left, s.right, s.bounds)


def _of_blocks(problem: Problem, stand_ins: BlockStandIns, rows: _Rows) -> _Columns:
    """Stand-ins for the past of every block of queries."""
    x, columns = problem.inputs, problem.graph.columns
    if columns is None:
        block = torch.zeros(rows.stop - rows.start, dtype=torch.int64, device=x.query.device)
    else:
        block = columns.block(x, rows.start, rows.stop)
    s = stand_ins
    key, value, bias, size = (_by_query_head(x, part)[:, :, block] for part in (s.key, s.value, s.bias, s.size))
    scores = _products(rows.query, key)
    if isinstance(problem.weights, Softmax):  # the bias includes the size
        return scores + bias, (size > 0).to(scores.dtype), value, None
    return scores, size, value, None


def _of_ranges(x: Inputs, stand_ins: RangeStandIns, rows: _Rows) -> _Columns:
    """Stand-ins for the ranges of keys of every query's step."""
    step = stand_ins.step(x, rows.start, rows.stop)
    key, value = (_by_query_head(x, part)[:, :, step] for part in (stand_ins.key, stand_ins.value))
    before = pad(rows.kept.to(key.dtype).cumsum(-1), (1, 0))
    kept = before.gather(-1, stand_ins.edges[step].expand(*before.shape[:3], -1)).diff(dim=-1)
    return _products(rows.query, key), working(stand_ins.size)[:, None, step] - kept, value, None


def _of_cohorts(problem: Problem, stand_ins: CohortStandIns, rows: _Rows) -> _Columns:
    """Stand-ins for every query's cohort; queries of no cohort see none."""
    x, columns, s = problem.inputs, problem.graph.columns, stand_ins
    if columns is None or columns.place is None:
        raise ValueError("graph: expected the lists of cohorts beside their stand-ins, got others")
    cohort = cohort_of_queries(x, columns.place)[:, :, rows.start : rows.stop]

    def of_queries(tensor: Tensor) -> Tensor:
        by_query = take(_by_query_head(x, tensor).flatten(3), cohort.clamp_min(0))
        return torch.unflatten(by_query, -1, tensor.shape[3:])

    real = True if x.valid is None else x.valid[:, None, None]
    unkept = (real & ~rows.kept).to(rows.query.dtype)
    scores = _products(rows.query, of_queries(s.key)) + of_queries(s.bias)
    if x.bias is not None and rows.bias is not None:
        largest = x.bias.largest[:, None, None]
        unkept, scores = unkept * (rows.bias - largest).exp(), scores + largest
    cluster = one_hot(s.label, s.count).to(unkept.dtype).repeat_interleave(x.gqa_ratio, 1)
    represented = unkept @ cluster / of_queries(s.size).clamp_min(1)
    scores = scores + logarithm(of_queries(s.mass) * represented)
    multiplicity, value = (cohort >= 0).to(scores.dtype).unsqueeze(-1), of_queries(s.value)
    if s.left is None or s.right is None or s.factor is None or s.bounds is None:
        return scores, multiplicity, value, None
    shift = value_shift(rows.query.unsqueeze(-2), *map(of_queries, (s.left, s.right, s.bounds))).squeeze(-2)
    return scores, multiplicity, torch.cat([value, of_queries(s.factor).unsqueeze(-1)], -1), shift


def _by_query_head(x: Inputs, tensor: Tensor) -> Tensor:
    """(B, Hkv, ...) -> (B, Hq, ...), numbers in working precision."""
    return (working(tensor) if tensor.is_floating_point() else tensor).repeat_interleave(x.gqa_ratio, 1)


def _products(query: Tensor, key: Tensor) -> Tensor:
    """The scores (B, Hq, M, C) of each query's own keys (B, Hq, M, C, D)."""
    return (key @ query.unsqueeze(-1)).squeeze(-1)
