"""Attention inside groups, beside a band and one shared list, by Triton's kernels."""

from __future__ import annotations

import torch
from torch import Tensor

from fewkeys.core.groups import Groups
from fewkeys.core.inputs import Inputs
from fewkeys.core.weights import Entmax, Softmax
from fewkeys.execute.problem import Problem


def unsupported(problem: Problem) -> str | None:
    """What `attend` does not take of groups, stand-ins and weights; None where it takes all."""
    groups, stand_ins, weights = _groups(problem), problem.stand_ins, problem.weights
    if groups.query.shape[3] != 1 or groups.key.shape[3] != 1:
        return "expected one group for each query and key, got several memberships"
    if stand_ins is not None:
        return "expected rest=Drop() beside groups, got stand-ins"
    if isinstance(weights, Entmax) and weights.alpha > 2:
        return f"expected an alpha of at most 2, got {weights}"
    if not isinstance(weights, Softmax | Entmax):
        return f"expected Softmax() or Entmax() weights, got {weights}"
    return None


def attend(problem: Problem) -> Tensor:
    """The output (B, Hq, Nq, Dv), equal to `reference.attend` up to rounding.

    Products are taken in the input's dtype and summed in float32. Second derivatives do not exist. Cost O((edges + n
    band) (D + Dv)), entmax so many times more as it takes rounds, of which nothing but the output is stored; sorting is
    O(n log n).
    """
    from fewkeys.execute.triton.grouped_op import grouped

    x, graph, groups, weights = problem.inputs, problem.graph, _groups(problem), problem.weights
    # An empty band ends before it begins, for every query.
    left, right = (0, -x.queries - x.keys) if graph.band is None else graph.band
    # What no query finds on its left or right, and what causality forbids, is not looked for.
    reach = (min(left, x.queries - 1 + x.offset), min(right, 0 if x.is_causal else x.keys - 1 - x.offset))
    hidden = None if graph.band is None else graph.hidden
    listed = None if graph.columns is None else _listed(x, graph.columns.index, graph.columns.used)
    members = (*_sorted(groups.query, None, groups.count), *_sorted(groups.key, x.valid, groups.count))
    alpha = weights.alpha if isinstance(weights, Entmax) else 1.0
    numbers = (groups.count, alpha, x.scale, *reach, x.offset, x.is_causal)
    return grouped(x.query, x.key, x.value, hidden, listed, *members, *numbers)[0]


def _groups(problem: Problem) -> Groups:
    if problem.graph.groups is None:
        raise ValueError("graph: expected one with groups, got none")
    return problem.graph.groups


def _sorted(ids: Tensor, valid: Tensor | None, count: int) -> tuple[Tensor, Tensor]:
    """Groups (B, Hq, N) of tokens, -1 for none and for padding, and the tokens by group; those of none last."""
    group = ids.squeeze(-1)
    if valid is not None:
        group = group.masked_fill(~valid.unsqueeze(1), -1)
    order = group.masked_fill(group < 0, count).argsort(stable=True, dim=-1)
    return group.to(torch.int32), order.to(torch.int32)


def _listed(x: Inputs, index: Tensor, used: Tensor) -> Tensor:
    """Places (B, Hkv, S) of the shared list, Nk at fillings."""
    return index.squeeze(2).masked_fill(~used.squeeze(2), x.keys).to(torch.int32)
