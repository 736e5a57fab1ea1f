"""Thinformer: attention over keys and values thinned to represent all. Our implementation after the paper.

Kernel halving cuts a set in two halves with the sums of `h` nearly equal,

    h((k, v), (k', v')) = exp(scale <k, k'>) (<v, v'> + vmax^2),

by taking one of each pair with a chance that balances what was taken before; Compress halves sets of four times the
size, level by level: after `levels` of them n / 2^levels keys are left, 2^g sqrt(n) in the paper's terms, and they are
attended to with equal weights. Keys are centred. The loop over pairs is sequential, as in the paper, for all heads and
blocks at once. Cost O(4^g n D).

Source: Carrell, Gong, Shetty, Dwivedi, Mackey, "Low-Rank Thinning" (arXiv 2502.12063), section 4; kernel halving:
Dwivedi, Mackey, "Generalized Kernel Thinning" (2022), algorithm 2 a; Compress: Shetty, Dwivedi, Mackey (2022).
"""

from __future__ import annotations

import math
from typing import Any

import torch
from experiments.peers.parts import check_encoder, listed, rows
from torch import Tensor

MOST = 1024
"""The most keys left: with more, exact attention was always faster."""
FAILURE = 0.5
"""The allowed probability that the balance fails, as in the paper's runs."""


def attend(
    q: Tensor, k: Tensor, v: Tensor, *, scale: float, is_causal: bool, generator: torch.Generator, levels: int
) -> Tensor:
    """Attention over one of 2^levels keys."""
    check_encoder(is_causal)
    return listed(q, k, v, thin(k, v, scale, levels, generator), scale)


def thin(k: Tensor, v: Tensor, scale: float, levels: int, generator: torch.Generator) -> Tensor:
    """The indices (B, H, M) that Compress leaves: one of 2^levels. Keys beyond whole blocks are dropped at random."""
    order = torch.rand(k.shape[:3], generator=generator).argsort(-1)
    blocks = 4**levels
    index = order[..., : k.shape[2] // blocks * blocks].unflatten(2, (blocks, -1))
    key = k - k.mean(2, keepdim=True)
    most = v.abs().amax((2, 3), keepdim=True)
    for _ in range(levels):
        index = index.unflatten(2, (-1, 4)).flatten(3)
        flat = index.flatten(2)
        blocks_of = [rows(x, flat).unflatten(2, index.shape[2:]) for x in (key, v)]
        index = index.gather(-1, halve(*blocks_of, scale, most.unsqueeze(-1), generator))
    return index.flatten(2)


def halve(k: Tensor, v: Tensor, scale: float, most: Tensor, generator: torch.Generator) -> Tensor:
    """Half of each block (B, H, blocks, 2 m, D): the indices (B, H, blocks, m) kept, one of each pair."""
    score = scale * (k @ k.mT)
    kernel = (score - score.amax((-2, -1), keepdim=True)).exp() * (v @ v.mT + most * most)
    # Of the pairs (x, y): between the differences h(x, .) - h(y, .) of any two of them.
    apart = kernel[..., ::2, :] - kernel[..., 1::2, :]
    apart = apart[..., ::2] - apart[..., 1::2]
    pairs = apart.shape[-1]
    size = apart.diagonal(dim1=-2, dim2=-1).clamp_min(1e-30)
    chance = torch.rand(size.shape, generator=generator)
    spread, taken = torch.zeros(size.shape[:-1]), torch.empty(size.shape)
    sums = torch.zeros(size.shape)
    wide = math.sqrt(2 * math.log(2 * 2 * pairs / FAILURE))
    for pair in range(pairs):
        norm, leaning = size[..., pair], sums[..., pair]
        limit = torch.maximum(norm.sqrt() * spread.sqrt() * wide, norm)
        sign = torch.where(chance[..., pair] < 0.5 * (1 - leaning / limit), 1.0, -1.0)
        taken[..., pair] = sign
        spread = spread + norm * (1 + (norm - 2 * limit) * spread / limit.square()).clamp_min(0)
        sums = torch.addcmul(sums, apart[..., pair, :], sign.unsqueeze(-1))
    flip = torch.rand((*size.shape[:-1], 1), generator=generator) < 0.5  # which of the halves
    first = (taken > 0) ^ flip
    return 2 * torch.arange(pairs) + (~first).long()


def grid(queries: int, keys: int, dim: int) -> list[dict[str, Any]]:
    """The settings to search, among them those nearest to the paper's g = 2 and 4."""
    return [{"levels": levels} for levels in range(1, int(math.log(keys, 4)) + 1) if keys >> levels <= MOST]
