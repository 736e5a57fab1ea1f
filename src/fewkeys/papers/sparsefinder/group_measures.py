"""Measures of groups: the share of scores that they save, and how even their sizes are."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fewkeys.core.validation import check_count
from fewkeys.papers.sparsefinder.groups import Groups


def computation_sparsity(groups: Groups) -> Tensor:
    """`1 - sum_g |Q_g| |K_g| / (Nq Nk)`, at least 0, per head (B, Hq): the share of all scores not computed.

    Groups run whole: the scores of all pairs in a group are computed, also of pairs that causality or padding hides,
    and a pair that shares two groups is computed twice. So this is at most the sparsity of the edges.
    """
    if not isinstance(groups, Groups):
        raise TypeError(f"groups: expected Groups, got {type(groups).__name__}; take graph.extra")
    queries, keys = groups.query.shape[2], groups.key.shape[2]
    scores = (_occupancy(groups.query, groups.count) * _occupancy(groups.key, groups.count)).sum(-1)
    return (1.0 - scores / (queries * keys)).clamp_min(0.0).float()


def group_entropy(ids: Tensor, count: int) -> Tensor:
    """`-sum_g p_g log p_g / log count` per head (B, H), p_g the share of all memberships that are in group g.

    1 if all groups have the same size, 0 if one has all members (or `count` is 1, or there are no members). `ids`
    (B, H, N, M) int64 as in `Groups`, -1 for none.
    """
    check_count("count", count)
    got = f"{ids.dtype} {tuple(ids.shape)}" if isinstance(ids, Tensor) else type(ids).__name__
    if not isinstance(ids, Tensor) or ids.dtype != torch.int64 or ids.ndim != 4:
        raise ValueError(f"ids: expected int64 (batch, heads, tokens, memberships), got {got}")
    if ids.numel() and int(ids.max()) >= count:
        raise ValueError(f"ids: expected ids below count = {count}, got {int(ids.max())}")
    size = _occupancy(ids, count)
    p = size / size.sum(-1, keepdim=True).clamp_min(1)
    entropy: Tensor = -torch.special.xlogy(p, p).sum(-1)
    return (entropy / math.log(max(count, 2))).clamp(0.0, 1.0).float()


def _occupancy(ids: Tensor, count: int) -> Tensor:
    """Members of every group, (B, H, count) float64; a token that names a group twice is one member."""
    batch, heads = ids.shape[:2]
    ordered = ids.sort(-1).values
    repeated = torch.zeros_like(ordered, dtype=torch.bool)
    repeated[..., 1:] = ordered[..., 1:] == ordered[..., :-1]
    place = ordered.masked_fill(repeated | (ordered < 0), count).flatten(2)
    size = torch.zeros((batch, heads, count + 1), dtype=torch.float64, device=ids.device)
    return size.scatter_add_(-1, place, torch.ones_like(place, dtype=torch.float64))[..., :count]
