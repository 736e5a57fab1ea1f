"""Performer: positive random features of the softmax kernel (FAVOR+). Our implementation after the paper.

    phi(x) = exp(w_f . x - |x|^2 / 2) / sqrt(F),   E <phi(x), phi(y)> = exp(<x, y>),   x = sqrt(scale) q or k,

with w_f normal, orthogonal in blocks of D; each head's features of keys are divided by the largest of them, each
query's by its own largest, which cancels. o_i = phi(q_i) (phi(K)^T V) / phi(q_i) (phi(K)^T 1). Cost O(n F D).

Source: Choromanski et al., "Rethinking Attention with Performers" (arXiv 2009.14794), lemma 1, sections 2.3, 2.4.
"""

from __future__ import annotations

from typing import Any

import torch
from experiments.peers.parts import check_encoder
from torch import Tensor


def attend(
    q: Tensor, k: Tensor, v: Tensor, *, scale: float, is_causal: bool, generator: torch.Generator, features: int
) -> Tensor:
    """Attention by `features` random features, the same for all heads."""
    check_encoder(is_causal)
    planes = directions(features, q.shape[-1], generator)
    left, right = (exponents(scale**0.5 * x, planes) for x in (q, k))
    left = (left - left.amax(-1, keepdim=True)).exp()
    right = (right - right.amax((-2, -1), keepdim=True)).exp()
    below = left @ right.sum(2).unsqueeze(-1)
    return left @ (right.mT @ v) / below.clamp_min(1e-30)


def exponents(x: Tensor, planes: Tensor) -> Tensor:
    """log(phi sqrt(F)): (..., F)."""
    return x @ planes.T - x.square().sum(-1, keepdim=True) / 2


def directions(features: int, dim: int, generator: torch.Generator) -> Tensor:
    """Normal vectors (F, D), each block of D of them orthogonal, lengths those of independent ones."""
    blocks = []
    for _ in range(0, features, dim):
        square, corner = torch.linalg.qr(torch.randn(dim, dim, generator=generator))
        square = square * corner.diagonal().sign()  # without it, directions are not uniform
        blocks.append(square.T * torch.randn(dim, dim, generator=generator).norm(dim=-1, keepdim=True))
    return torch.cat(blocks)[:features]


def grid(queries: int, keys: int, dim: int) -> list[dict[str, Any]]:
    """The settings to search: the 12 and 49 features of the paper's tables, and more."""
    return [{"features": features} for features in (12, 49, 128, 256, 512, 1024)]
