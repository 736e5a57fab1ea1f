"""alpha-entmax with its exact derivatives.

`p_j = max(0, z_j - tau)^r` with `z = (alpha - 1) s`, `r = 1 / (alpha - 1)` and tau such that the row sums to one
(Peters, Niculae, Martins, "Sparse Sequence-to-Sequence Models", ACL 2019). With the largest z moved to 0, tau lies in
[-1, 0). Hidden entries carry -inf; a row without visible entries gives zeros.

For alpha <= 2 the sum is convex in tau, so Newton's steps from tau = -1 climb to the root and never pass it. For
alpha = 2 the last step is exact (Michelot, 1986); else convergence is quadratic, and stops at rounding. Nothing is
sorted.
"""

import math
from typing import Any

import torch
from torch import Tensor

from fewkeys.core.derivatives import are_transformed, constants
from fewkeys.core.precision import working
from fewkeys.core.validation import check_real

NEWTON_STEPS = 100
"""A bound that is not reached: about log(row length) + 6 steps suffice."""


def check_alpha(alpha: float, name: str = "alpha") -> None:
    """Raise `ValueError` unless 1 < alpha <= 2."""
    if check_real(name, alpha, above=1.0) > 2:
        raise ValueError(f"{name}: expected a finite number in (1, 2], got {alpha}")


def entmax(scores: Tensor, alpha: float) -> Tensor:
    """alpha-entmax along the last dimension of `scores` (..., N), 1 < alpha <= 2. Cost O(N) per row and step."""
    check_alpha(alpha)
    # Near alpha = 1 the power is large, and multiplies the rounding of float32.
    rows = (scores.double() if alpha < 1.01 else working(scores)).reshape(-1, scores.shape[-1])
    weights: Tensor = (_by_operations if are_transformed(rows) else _Entmax.apply)(rows, alpha)
    return weights.view(scores.shape).to(scores.dtype)


def _shifted(rows: Tensor, alpha: float) -> Tensor:
    """Fresh z (L, N), whose rows have the largest entry 0 unless all are hidden."""
    if not rows.shape[-1]:
        return rows.clone()
    top = rows.detach().amax(-1, keepdim=True)
    return (rows - top.masked_fill(top == -math.inf, 0.0)) * (alpha - 1)


def _threshold(z: Tensor, power: float) -> Tensor:
    """The tau (L, 1) of every row."""
    tau = z.new_full((z.shape[0], 1), -1.0)
    tiny, close = torch.finfo(tau.dtype).tiny, 16 * torch.finfo(tau.dtype).eps
    for _ in range(NEWTON_STEPS if tau.numel() else 0):
        above = (z - tau).clamp_min_(0.0)
        if power == 1:
            total, slope = above.sum(-1, keepdim=True), above.sign_().sum(-1, keepdim=True)
        elif power == 2:
            total = torch.linalg.vector_norm(above, dim=-1, keepdim=True).square_()
            slope = 2 * above.sum(-1, keepdim=True)
        else:
            raised = above.pow(power - 1)
            total, slope = (raised * above).sum(-1, keepdim=True), power * raised.sum(-1, keepdim=True)
        # The slope is at least 1 near the root; it is zero for rows without entries, which do not move.
        step = ((total - 1) / slope.clamp_min(tiny)).masked_fill_(slope == 0, 0.0)
        tau += step
        if float(step.abs().max()) <= close:
            break
    return tau


def _by_operations(rows: Tensor, alpha: float) -> Tensor:
    """The same by operations that have derivatives of every kind.

    Newton's steps from the root do not move, but carry derivatives: one step the first, two steps the first three.
    """
    z, power = _shifted(rows, alpha), 1 / (alpha - 1)
    with constants():
        tau = _threshold(z, power)
    for _ in range(2):
        total = _raised(z - tau, power).sum(-1, keepdim=True)
        slope = _raised(z - tau, power - 1).sum(-1, keepdim=True) * power
        tau = tau + ((total - 1) / slope.masked_fill(slope == 0, 1.0)).masked_fill(slope == 0, 0.0)
    return _raised(z - tau, power)


def _raised(above: Tensor, power: float) -> Tensor:
    """Powers of what is positive, else zero with all its derivatives."""
    support = above > 0
    return above.where(support, 1.0).pow(power) * support


class _Entmax(torch.autograd.Function):
    @staticmethod
    def forward(rows: Tensor, alpha: float) -> Tensor:
        z, power = _shifted(rows, alpha), 1 / (alpha - 1)
        weights = z.sub_(_threshold(z, power)).clamp_min_(0.0)
        if power != 1:
            weights.pow_(power)
        # Correct the rounding of the sum; rows without entries stay zero.
        return weights.div_(weights.sum(-1, keepdim=True).clamp_min_(torch.finfo(z.dtype).tiny))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, float], output: Tensor) -> None:
        ctx.alpha = inputs[1]
        ctx.save_for_backward(output)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        # dp/ds = diag(u) - u u^T / sum(u) with u = p^(2 - alpha) on the support.
        (weights,) = ctx.saved_tensors
        u = weights.sign()
        if ctx.alpha != 2:
            u = u * weights.masked_fill(weights == 0, 1.0).pow(2 - ctx.alpha)
        mass = u.sum(-1, keepdim=True).clamp_min(torch.finfo(u.dtype).tiny)
        centred = grad - (u * grad).sum(-1, keepdim=True) / mass
        return u * centred, None
