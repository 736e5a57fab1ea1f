"""A tree is a permutation: perfectly balanced binary splits of 2^p rows down to leaves of 8.

A set of m rows, centred to y_j, is ordered along a direction u and cut in the middle. u starts as the longest y_j, goes
through power iterations `u <- sum_j y_j (y_j . u)`, and then through steps of balanced 2-means: the two centres of a
split are opposite, so the direction between them is minus the sum of the left half, by which the rows are ordered anew.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fewkeys.tree.rule import LEAF

POWER, REFINE = 2, 2


def split(rows: Tensor) -> Tensor:
    """The permutation (N, m), int64, of rows (N, m, F), m = 8 * 2^p: every aligned run of m / 2^i is a node.

    Every set of rows by itself, whatever else is in the batch. Equal rows keep their order.
    Cost O(m log m (F + log m)) for each of the N sets.
    """
    count, most, _ = rows.shape
    found = torch.arange(most, device=rows.device).expand(count, -1)
    size = most
    while size > LEAF:
        sets = rows.reshape(-1, size, rows.shape[-1])
        order = _ordered(sets - sets.mean(1, keepdim=True))
        rows = _take(sets, order).reshape(count, most, -1)
        found = found.reshape(-1, size).gather(1, order).reshape(count, most)
        size //= 2
    return found


def _ordered(y: Tensor) -> Tensor:
    """The order (N, m) of centred rows (N, m, F) in which the halves are the two sides."""
    along = _take(y, y.square().sum(-1).argmax(1, keepdim=True))
    for _ in range(POWER):
        along = (y @ along.mT).mT @ y
        along = along / torch.linalg.vector_norm(along, dim=-1, keepdim=True).clamp_min(torch.finfo(y.dtype).tiny)
    order = (y @ along.mT).squeeze(-1).argsort(dim=-1, stable=True)
    for _ in range(REFINE):
        left = _take(y, order[:, : y.shape[1] // 2]).sum(1, keepdim=True)
        order = -(y @ left.mT).squeeze(-1)
        order = order.argsort(dim=-1, stable=True)
    return order


def _take(rows: Tensor, index: Tensor) -> Tensor:
    return rows.gather(1, index.unsqueeze(-1).expand(-1, -1, rows.shape[-1]))
