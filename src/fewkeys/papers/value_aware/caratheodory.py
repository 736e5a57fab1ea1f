"""Caratheodory's theorem, batched: a convex combination of n points in d dimensions is one of d + 1 of them."""

import torch
from torch import Tensor
from torch.nn.functional import pad


def caratheodory(weights: Tensor, points: Tensor) -> Tensor:
    """Weights with the same sum and mean, at most d + 1 of them nonzero, on points that already had weight.

    A round splits a row's points into g > d + 1 groups, reduces the means of the groups to d + 1 (`_reduce`), scales
    the weights in a group by the change of the group's weight, and drops the empty groups.

    weights: (R, N) float64, non-negative. points: (N, d) float64; duplicates and common subspaces are allowed. Returns
    (R, N). Cost per row: O(N d + d^3 log(N / d)), memory O(N d).

    Source: Maalouf, Jubran, Feldman, Fast and accurate least-mean-squares solvers (arXiv 1906.04705), algorithm 2.
    """
    rows, count = weights.shape
    limit = points.shape[-1] + 1
    # A third more groups than needed: a round then moves little memory, and rounds are few.
    target = limit + max(1, limit // 3)
    index = torch.arange(count, device=weights.device).expand(rows, count)
    remaining = weights
    while (n := index.shape[1]) > limit:
        size = max(1, min(-(-n // target), -(-n // limit) - 1))
        groups = -(-n // size)
        # Padding is the first point with weight zero.
        index, remaining = (pad(part, (0, groups * size - n)).view(rows, groups, size) for part in (index, remaining))
        mass = remaining.sum(-1)
        divisor = torch.where(mass > 0, mass, 1.0)
        means = (remaining[..., None] * points[index]).sum(-2) / divisor[..., None]
        reduced = _reduce(mass, means)
        kept = reduced.topk(limit, -1).indices.sort(-1).values[..., None].expand(rows, limit, size)
        remaining = (remaining * (reduced / divisor)[..., None]).gather(1, kept).flatten(1)
        index = index.gather(1, kept).flatten(1)
    return torch.zeros_like(weights).scatter_add(1, index, remaining)


def _reduce(weights: Tensor, points: Tensor) -> Tensor:
    """At most d + 1 of g weights, with sum and mean kept: weights (R, g), points (R, g, d) -> (R, g).

    The rows of `basis` (g - d - 1, g) are orthonormal moves that change neither. Walk along the first until a weight is
    zero; reflect the basis (Householder) so that only its first row moves that weight; drop that row. The basis stays
    orthonormal: rounding does not build up, and no pivot can be small.
    """
    rows, groups, d = points.shape
    # Scaling does not change the moves. It keeps the column of ones significant beside large values.
    scale = points.abs().amax((1, 2), keepdim=True)
    system = torch.cat([torch.ones_like(points[..., :1]), points / torch.where(scale > 0, scale, 1.0)], -1)
    # The last columns of a complete QR are orthogonal to the system whatever its rank.
    basis = torch.linalg.qr(system, mode="complete").Q[..., d + 1 :].mT.contiguous()
    weights = weights.clone()
    active = torch.ones_like(weights, dtype=torch.bool)
    all_rows = torch.arange(rows, device=weights.device)
    for _ in range(groups - d - 1):
        move = basis[:, 0].masked_fill(~active, 0.0)
        # Points without weight are removed first, by a step of length zero: they must never gain weight.
        ratio = torch.where(move > 0, weights / move.clamp_min(1e-300), torch.inf).masked_fill(~active, torch.inf)
        ratio = ratio.masked_fill(active & (weights == 0), -1.0)
        step, removed = ratio.min(-1)
        step = torch.where(step.isfinite(), step.clamp_min(0.0), 0.0)
        weights = (weights - step[:, None] * move).clamp_min_(0.0)
        weights[all_rows, removed] = 0.0
        active[all_rows, removed] = False
        basis = _forget(basis, removed)
    return weights


def _forget(basis: Tensor, column: Tensor) -> Tensor:
    """The orthonormal rows (R, g - 1, n) that span the moves of `basis` (R, g, n) with zero in `column` (R,)."""
    entries = basis.gather(2, column[:, None, None].expand(-1, basis.shape[1], 1))
    size = entries.norm(dim=1, keepdim=True)
    mirror = entries.clone()
    mirror[:, :1] += torch.where(entries[:, :1] < 0, -size, size)
    squared = mirror.square().sum(1, keepdim=True)
    # A column of zeros needs no reflection: any row may be dropped.
    factor = torch.where(squared > 0, 2.0 / squared.clamp_min(1e-300), 0.0)
    return basis[:, 1:].addcmul(mirror[:, 1:] * factor, mirror.mT @ basis, value=-1.0)
