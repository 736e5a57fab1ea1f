"""The definition of a plan, with which every test compares: dense matrices in working precision.

Every query is scored against every key under the graph's mask. Stand-ins are further columns.
"""

from typing import NamedTuple, cast

import torch
from torch import Tensor
from torch.nn.functional import one_hot, pad

from fewkeys.core.distances import logarithm
from fewkeys.core.graph import Columns, cohort_of_queries, query_blocks
from fewkeys.core.inputs import Inputs
from fewkeys.core.precision import working
from fewkeys.core.rows import take
from fewkeys.core.weights import Softmax, positive
from fewkeys.execute.problem import Problem
from fewkeys.rest.base import BlockStandIns, RangeStandIns, StandIns, value_shift


def unsupported(problem: Problem) -> None:
    """No reason: the reference defines the answer to every problem."""


def attend(problem: Problem) -> Tensor:
    """The output (B, Hq, Nq, Dv), some queries at a time. Cost O(n^2 (D + Dv)), memory O(n (D + Dv))."""
    x = problem.inputs
    return torch.cat([_attend(problem, start, stop) for start, stop in query_blocks(x)], 2).to(x.query.dtype)


def _attend(problem: Problem, start: int, stop: int) -> Tensor:
    x, s, kernel = problem.inputs, problem.stand_ins, problem.weights.kernel
    query, kept = working(x.query[:, :, start:stop]) * x.scale, problem.graph.mask(start, stop)
    key, value = _by_query_head(x, x.key), _by_query_head(x, x.value)
    bias = None if x.bias is None else x.bias.of(start + x.offset, stop + x.offset, x.keys)
    scores = query @ key.mT if bias is None else query @ key.mT + bias
    scores = scores.masked_fill(~kept, -torch.inf)
    if s is None:
        (weight,) = kernel([scores])
        return (weight @ value) / positive(weight.sum(-1, keepdim=True))
    rows = _Rows(start, stop, query, kept, bias)
    if isinstance(s, StandIns):
        columns = _of_lists(problem, s, rows)
    elif isinstance(s, RangeStandIns):
        columns = _of_ranges(x, s, rows)
    else:
        columns = _of_blocks(problem, s, rows)
    extra, multiplicity, mean, shift = columns
    weight, weight_extra = kernel([scores, extra.masked_fill(multiplicity <= 0, -torch.inf)])
    weight_extra = weight_extra * multiplicity
    total = weight.sum(-1, keepdim=True) + weight_extra.sum(-1, keepdim=True)
    mixed = _times(weight_extra, mean)
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
"""What stand-ins add to M rows: scores and multiplicities (B, Hq, M, C); values (B, Hq, M or 1, C, Dv), of each row or
of all; the first-order term (B, Hq, M, Dv), whose factors are then a last column of the values.
"""


def _of_lists(problem: Problem, s: StandIns, rows: _Rows) -> _Columns:
    """Of a key head, or of each query's cohort; queries of no cohort see none."""
    x, columns = problem.inputs, problem.graph.columns
    cohort = None
    if columns is not None and columns.place is not None:
        cohort = cohort_of_queries(x, columns.place)[:, :, rows.start : rows.stop]

    def of_rows(tensor: Tensor) -> Tensor:
        by_head = _by_query_head(x, tensor)
        if cohort is None:
            return by_head
        return torch.unflatten(take(by_head.flatten(3), cohort.clamp_min(0)), -1, tensor.shape[3:])

    real = True if x.valid is None else x.valid[:, None, None]
    unkept = (real & ~rows.kept).to(rows.query.dtype)
    scores = _times(rows.query, of_rows(s.key).mT)
    if s.bias is not None:
        scores = scores + of_rows(s.bias)
    if x.bias is not None and rows.bias is not None:
        largest = x.bias.largest[:, None, None]
        unkept, scores = unkept * (rows.bias - largest).exp(), scores + largest
    cluster = one_hot(s.label, s.count).to(unkept.dtype).repeat_interleave(x.gqa_ratio, 1)
    multiplicity = of_rows(s.mass) * (unkept @ cluster) / of_rows(s.size).clamp_min(1)
    if cohort is not None:
        multiplicity = multiplicity * (cohort >= 0).unsqueeze(-1)
    if x.bias is not None:
        scores, multiplicity = scores + logarithm(multiplicity), (multiplicity > 0).to(scores.dtype)
    value = of_rows(s.value)
    if (terms := s.first_order) is None:
        return scores, multiplicity, value, None
    left, right, bounds, factor = map(of_rows, terms)
    dim = 2 if cohort is None else 3  # all rows of a head are one product, or each row is one
    shift = value_shift(rows.query.unsqueeze(dim), left, right, bounds).squeeze(dim)
    return scores, multiplicity, torch.cat([value, factor.unsqueeze(-1)], -1), shift


def _of_blocks(problem: Problem, stand_ins: BlockStandIns, rows: _Rows) -> _Columns:
    x, s = problem.inputs, stand_ins
    block, parts = (
        cast("Columns", problem.graph.columns).block(x, rows.start, rows.stop),
        (s.key, s.value, s.bias, s.size),
    )
    key, value, bias, size = (_by_query_head(x, part).index_select(2, block) for part in parts)
    scores = _times(rows.query, key.mT)
    if isinstance(problem.weights, Softmax):  # the bias includes the size
        return scores + bias, (size > 0).to(scores.dtype), value, None
    return scores, size, value, None


def _of_ranges(x: Inputs, stand_ins: RangeStandIns, rows: _Rows) -> _Columns:
    step = stand_ins.step(x, rows.start, rows.stop)
    key, value = (_by_query_head(x, part).index_select(2, step) for part in (stand_ins.key, stand_ins.value))
    before = pad(rows.kept.to(key.dtype).cumsum(-1), (1, 0))
    kept = before.gather(-1, stand_ins.edges[step].expand(*before.shape[:3], -1)).diff(dim=-1)
    return _times(rows.query, key.mT), working(stand_ins.size)[:, None, step] - kept, value, None


def _by_query_head(x: Inputs, tensor: Tensor) -> Tensor:
    """(B, Hkv, ...) -> (B, Hq, ...), numbers in working precision."""
    return (working(tensor) if tensor.is_floating_point() else tensor).repeat_interleave(x.gqa_ratio, 1)


def _times(rows: Tensor, matrix: Tensor) -> Tensor:
    """Rows (B, H, M, X) times one matrix each, (B, H, M, X, Y), or times the same one, (B, H, 1, X, Y)."""
    return rows @ matrix.squeeze(2) if matrix.shape[2] == 1 else (rows.unsqueeze(-2) @ matrix).squeeze(-2)
