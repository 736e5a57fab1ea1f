"""alpha-entmax with its exact derivatives, of whole rows or of rows that are split over several tensors.

`p_j = max(0, z_j - tau)^r` with `z = (alpha - 1) s`, `r = 1 / (alpha - 1)` and tau such that the row sums to one
(Peters, Niculae, Martins, "Sparse Sequence-to-Sequence Models", ACL 2019). With the largest z moved to 0, tau lies in
[-1, 0).

For alpha <= 2 the sum is convex in tau, so Newton's steps from tau = -1 climb to the root and never pass it. For
alpha = 2 a step solves for tau on the entries above the last one, and the last step is exact (Michelot, 1986); for
alpha = 1.5 and all others convergence is quadratic, and stops at rounding. For alpha > 2 tau is found by bisection. A
step costs one pass over the entries; nothing is sorted. Hidden entries carry -inf; a row without visible entries gives
zeros.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fewkeys.core.derivatives import are_transformed, constants

BISECTIONS = 60
NEWTON_STEPS = 100
"""A bound that is not reached: about log(row length) + 6 steps suffice."""

Lines = Sequence[Tensor]
"""Tensors (lines, columns): every line is a piece of a row."""


def entmax(scores: Tensor, alpha: float) -> Tensor:
    """alpha-entmax along the last dimension of `scores` (..., N), alpha > 1. Cost O(N) per row and step."""
    lines = scores.double() if scores.dtype == torch.float64 else scores.float()
    lines = lines.reshape(-1, scores.shape[-1])
    row = torch.arange(lines.shape[0], device=scores.device)
    (result,) = entmax_of_split_rows([lines], [row], lines.shape[0], alpha)
    return result.view(scores.shape).to(scores.dtype)


def entmax_of_split_rows(parts: Lines, rows: Sequence[Tensor], count: int, alpha: float) -> list[Tensor]:
    """alpha-entmax of `count` rows whose entries stand in several tensors.

    Line l of `parts[p]` (L, W), float64 or float32, belongs to row `rows[p][l]`. Returns the weights in their places.
    """
    if are_transformed(*parts):
        return _by_operations(parts, rows, count, alpha)
    return list(_Entmax.apply(alpha, count, rows, *parts))  # type: ignore[no-untyped-call]


def largest(parts: Lines, rows: Sequence[Tensor], count: int) -> Tensor:
    """The largest entry of every row (count,), 0 if all are -inf; no gradient."""
    top = parts[0].new_full((count,), -math.inf)
    for part, row in zip(parts, rows, strict=True):
        if part.shape[-1]:
            top.scatter_reduce_(0, row, part.detach().amax(-1), "amax")
    return top.masked_fill_(top == -math.inf, 0.0)


def _newton(z: Lines, rows: Sequence[Tensor], count: int, power: float) -> Tensor:
    tau = z[0].new_full((count,), -1.0)
    tiny, close = torch.finfo(tau.dtype).tiny, 16 * torch.finfo(tau.dtype).eps
    for _ in range(NEWTON_STEPS):
        total, slope = torch.zeros_like(tau), torch.zeros_like(tau)
        for part, row in zip(z, rows, strict=True):
            above = (part - tau[row].unsqueeze(-1)).clamp_min_(0.0)
            if power == 1:
                total.index_add_(0, row, above.sum(-1))
                slope.index_add_(0, row, above.sign_().sum(-1))
            elif power == 2:
                total.index_add_(0, row, torch.linalg.vector_norm(above, dim=-1).square_())
                slope.index_add_(0, row, above.sum(-1), alpha=2)
            else:
                raised = above.pow(power - 1)
                total.index_add_(0, row, (raised * above).sum(-1))
                slope.index_add_(0, row, raised.sum(-1), alpha=power)
        # The slope is at least 1 near the root; it is zero for rows without entries, which do not move.
        step = ((total - 1) / slope.clamp_min(tiny)).masked_fill_(slope == 0, 0.0)
        tau += step
        if float(step.abs().max()) <= close:
            break
    return tau


def _bisection(z: Lines, rows: Sequence[Tensor], count: int, power: float) -> Tensor:
    low, step = z[0].new_full((count,), -1.0), 1.0
    for _ in range(BISECTIONS):
        step /= 2
        total = torch.zeros_like(low)
        for part, row in zip(z, rows, strict=True):
            above = (part - (low + step)[row].unsqueeze(-1)).clamp_min_(0.0)
            total.index_add_(0, row, above.pow_(power).sum(-1))
        low = torch.where(total >= 1, low + step, low)
    return low


def _threshold(z: Lines, rows: Sequence[Tensor], count: int, power: float) -> Tensor:
    """The tau (count,) of every row."""
    return (_newton if power >= 1 else _bisection)(z, rows, count, power)


def _by_operations(parts: Lines, rows: Sequence[Tensor], count: int, alpha: float) -> list[Tensor]:
    """The same by operations that have derivatives of every kind.

    Newton's steps from the root do not move, but carry derivatives: a step makes those of the first order right, the
    next one those up to the third.
    """
    top, power = largest(parts, rows, count), 1 / (alpha - 1)
    z = [(part - top[row].unsqueeze(-1)) * (alpha - 1) for part, row in zip(parts, rows, strict=True)]
    with constants():
        tau = _threshold(z, rows, count, power)
    for _ in range(2):
        total, slope = torch.zeros_like(tau), torch.zeros_like(tau)
        for part, row in zip(z, rows, strict=True):
            total = total.index_add(0, row, _raised(part - tau[row].unsqueeze(-1), power).sum(-1))
            slope = slope.index_add(0, row, _raised(part - tau[row].unsqueeze(-1), power - 1).sum(-1) * power)
        tau = tau + ((total - 1) / slope.masked_fill(slope == 0, 1.0)).masked_fill(slope == 0, 0.0)
    return [_raised(part - tau[row].unsqueeze(-1), power) for part, row in zip(z, rows, strict=True)]


def _raised(above: Tensor, power: float) -> Tensor:
    """Powers of what is positive; zero, with all its derivatives, elsewhere."""
    support = above > 0
    return torch.where(support, above, 1.0).pow(power) * support


class _Entmax(torch.autograd.Function):
    @staticmethod
    def forward(alpha: float, count: int, rows: Sequence[Tensor], *parts: Tensor) -> tuple[Tensor, ...]:
        top, power = largest(parts, rows, count), 1 / (alpha - 1)
        z = [(part - top[row].unsqueeze(-1)).mul_(alpha - 1) for part, row in zip(parts, rows, strict=True)]
        tau = _threshold(z, rows, count, power)
        total = torch.zeros_like(tau)
        for part, row in zip(z, rows, strict=True):
            part.sub_(tau[row].unsqueeze(-1)).clamp_min_(0.0)
            if power != 1:
                part.pow_(power)
            total.index_add_(0, row, part.sum(-1))
        # Correct the rounding of the sum; rows without entries stay zero.
        total = total.clamp_min_(torch.finfo(total.dtype).tiny).reciprocal_()
        return tuple(part.mul_(total[row].unsqueeze(-1)) for part, row in zip(z, rows, strict=True))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.alpha, ctx.count, ctx.rows = inputs[:3]
        ctx.save_for_backward(*output)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        # dp/ds = diag(u) - u u^T / sum(u) with u = p^(2 - alpha) on the support. Second derivatives need operations
        # that are not in place.
        slopes, differentiable = [], torch.is_grad_enabled()
        mass, along = grads[0].new_zeros(ctx.count), grads[0].new_zeros(ctx.count)
        for weight, row, grad in zip(ctx.saved_tensors, ctx.rows, grads, strict=True):
            u = weight.sign()
            if ctx.alpha != 2:
                u = u * weight.masked_fill(weight == 0, 1.0).pow(2 - ctx.alpha)
            mass.index_add_(0, row, u.sum(-1))
            along.index_add_(0, row, (u * grad).sum(-1))
            slopes.append(u)
        mean = along / mass.clamp_min(torch.finfo(mass.dtype).tiny)
        centred = (g - mean[row].unsqueeze(-1) for row, g in zip(ctx.rows, grads, strict=True))
        scores = [u * g if differentiable else u.mul_(g) for u, g in zip(slopes, centred, strict=True)]
        return None, None, None, *scores
