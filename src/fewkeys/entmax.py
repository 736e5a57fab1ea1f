"""alpha-entmax of full rows, with its exact gradient.

`p_j = max(0, z_j - tau)^(1 / (alpha - 1))` with `z = (alpha - 1) s` and tau such that the row sums to one (Peters,
Niculae, Martins, "Sparse Sequence-to-Sequence Models", ACL 2019). alpha = 2 and alpha = 1.5 are solved exactly by
sorting; other alphas by bisection on tau, which is monotone. Hidden entries carry -inf; a row without visible entries
gives zeros.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

BISECTIONS = 60


def _threshold_sparsemax(z: Tensor) -> Tensor:
    ordered = z.sort(-1, descending=True).values
    count = torch.arange(1, z.shape[-1] + 1, dtype=z.dtype, device=z.device)
    # No entry below -1 is ever in the support; cutting the rest at -2 keeps the running sums exact and finite.
    total = ordered.clamp_min(-2.0).cumsum(-1)
    size = (1 + count * ordered > total).sum(-1, keepdim=True).clamp_min(1)
    return (total.gather(-1, size - 1) - 1) / size


def _threshold_15(z: Tensor) -> Tensor:
    ordered = z.sort(-1, descending=True).values.clamp_min(-2.0)
    count = torch.arange(1, z.shape[-1] + 1, dtype=z.dtype, device=z.device)
    mean = ordered.cumsum(-1) / count
    spread = (ordered * ordered).cumsum(-1) - count * mean * mean
    tau = mean - ((1 - spread) / count).clamp_min(0).sqrt()
    size = (tau <= ordered).sum(-1, keepdim=True).clamp_min(1)
    return tau.gather(-1, size - 1)


def _threshold_bisection(z: Tensor, power: float) -> Tensor:
    # With the largest z at 0, tau = -1 gives a sum of at least one and tau = 0 a sum of zero.
    low, step = torch.full_like(z[..., :1], -1.0), torch.ones_like(z[..., :1])
    for _ in range(BISECTIONS):
        step = step / 2
        total = (z - (low + step)).clamp_min(0).pow(power).sum(-1, keepdim=True)
        low = torch.where(total >= 1, low + step, low)
    return low


class _Entmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, scores: Tensor, alpha: float) -> Tensor:
        work = scores.double() if scores.dtype == torch.float64 else scores.float()
        top = work.amax(-1, keepdim=True)
        empty = top == -math.inf
        z = (alpha - 1) * (work - top.masked_fill(empty, 0.0))
        power = 1 / (alpha - 1)
        if alpha == 2.0:
            tau = _threshold_sparsemax(z)
        elif alpha == 1.5:
            tau = _threshold_15(z)
        else:
            tau = _threshold_bisection(z, power)
        p = (z - tau).clamp_min(0).pow(power)
        p = (p / p.sum(-1, keepdim=True).clamp_min(torch.finfo(p.dtype).tiny)).masked_fill(empty, 0.0)
        ctx.save_for_backward(p)
        ctx.alpha = alpha
        return p.to(scores.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (p,) = ctx.saved_tensors
        grad = grads[0].to(p.dtype)
        # dp/ds = diag(u) - u u^T / sum(u) with u = p^(2 - alpha) on the support.
        u = torch.where(p > 0, p.clamp_min(torch.finfo(p.dtype).tiny).pow(2 - ctx.alpha), 0.0)
        mean = (u * grad).sum(-1, keepdim=True) / u.sum(-1, keepdim=True).clamp_min(torch.finfo(p.dtype).tiny)
        return (u * (grad - mean)).to(grads[0].dtype), None


def entmax(scores: Tensor, alpha: float) -> Tensor:
    """alpha-entmax along the last dimension of `scores` (..., N), alpha > 1. Cost O(N log N) per row."""
    result: Tensor = _Entmax.apply(scores, alpha)  # type: ignore[no-untyped-call]
    return result
