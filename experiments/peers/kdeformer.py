"""KDEformer: sorted LSH blocks exactly, the rest from keys drawn by importance. Our implementation after the paper.

Keys are drawn, with replacement, with chance `p_j = (|a_j|^2 / sum |a|^2 + |v_j|^2 / sum |v|^2) / 2`, a_j the column of
key j in the softmax matrix of `probes` random queries, and weigh 1 / p_j; both the sums of weights and the values are
estimated from them. The paper's estimate of the columns is a kernel density estimate by the same hash that sorts the
blocks; its code draws the probes. Cost O(n (block + sampled) D + probes n D).

Source: Zandieh, Han, Daliri, Karbasi, "KDEformer" (arXiv 2302.02451), sections 3 and 4.
"""

from __future__ import annotations

from itertools import product
from typing import Any

import torch
from experiments.peers.blocks import beside, hashed
from experiments.peers.hyperattention import PLANES, far
from experiments.peers.parts import check_encoder, merge, rows
from torch import Tensor


def attend(
    q: Tensor, k: Tensor, v: Tensor, *, scale: float, is_causal: bool, generator: torch.Generator,
    block: int, sampled: int, probes: int = 32,
) -> Tensor:  # fmt: skip
    """Attention to a block of `block` keys and to `sampled` keys drawn by importance."""
    check_encoder(is_causal)
    cut = hashed(q, k, block, PLANES, generator)
    near = beside(q, k, v, cut, scale)
    chance = importance(q, k, v, scale, probes, generator)
    drawn = torch.multinomial(chance.flatten(0, 1), sampled, replacement=True, generator=generator)
    drawn = drawn.view(*chance.shape[:2], sampled)
    return merge([near, far(q, k, v, cut, drawn, -chance.gather(2, drawn).log(), scale)])


def importance(q: Tensor, k: Tensor, v: Tensor, scale: float, probes: int, generator: torch.Generator) -> Tensor:
    """The probability (B, H, N) of every key, above zero."""
    drawn = torch.rand(q.shape[:3], generator=generator).topk(min(probes, q.shape[2]), -1).indices
    column = (scale * rows(q, drawn) @ k.mT).softmax(-1).square().sum(2)
    size = v.square().sum(-1)
    parts = [part / part.sum(-1, keepdim=True).clamp_min(1e-30) for part in (column, size)]
    return (parts[0] + parts[1]) / 2 + 1e-9


def grid(queries: int, keys: int, dim: int) -> list[dict[str, Any]]:
    """The settings to search; the paper's tables have samples of 64 and 56."""
    blocks = [block for block in (16, 32, 64, 128, 256) if block <= keys // 4]
    counts = [sampled for sampled in (32, 64, 128, 256, 512) if sampled <= keys // 2]
    return [{"block": block, "sampled": sampled} for block, sampled in product(blocks, counts)]
