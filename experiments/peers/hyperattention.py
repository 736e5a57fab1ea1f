"""HyperAttention: sorted LSH blocks exactly, the rest from a sample of keys. Our implementation after the paper.

Queries and keys are sorted by an angular hash and cut into blocks. A query attends to its block and to `sampled` keys,
which are drawn uniformly for all queries of the head. Those outside its block represent all keys outside it, each with
weight (keys outside) / (drawn outside). Cost O(n (block + sampled) D).

Source: Han et al., "HyperAttention" (arXiv 2310.05869), algorithms 1 to 3; the hash has 7 planes as in its code.
"""

from __future__ import annotations

from itertools import product
from typing import Any

import torch
from experiments.peers.blocks import Cut, beside, hashed
from experiments.peers.parts import check_encoder, merge, partial, rows
from torch import Tensor

PLANES = 7


def attend(
    q: Tensor, k: Tensor, v: Tensor, *, scale: float, is_causal: bool, generator: torch.Generator,
    block: int, sampled: int,
) -> Tensor:  # fmt: skip
    """Attention to a block of `block` keys and to `sampled` drawn keys."""
    check_encoder(is_causal)
    cut = hashed(q, k, block, PLANES, generator)
    near = beside(q, k, v, cut, scale)
    if not sampled:
        return near[0]
    drawn = torch.rand(k.shape[:3], generator=generator).topk(min(sampled, k.shape[2]), -1).indices
    return merge([near, far(q, k, v, cut, drawn, torch.zeros(drawn.shape), scale)])


def far(
    q: Tensor, k: Tensor, v: Tensor, cut: tuple[Cut, Cut], drawn: Tensor, weight: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """Attention to the drawn keys (B, H, m) outside each query's block, scaled up to all keys outside it.

    `weight` (B, H, m), logarithms: how many keys each drawn one stands for, up to a factor.
    """
    mine, yours = cut
    count = k.shape[2]
    home = yours.number().gather(2, drawn).flatten(0, 1)[:, None]
    inside = home == torch.arange(mine.count)[:, None]
    level = weight.flatten(0, 1)[:, None].expand(inside.shape).masked_fill(inside, -torch.inf)
    outside = torch.full((mine.count,), float(count - yours.size))
    outside[-1] += yours.spare
    bias = level + (outside.clamp_min(1e-30).log()[:, None] - level.logsumexp(-1, keepdim=True)).nan_to_num(posinf=0.0)
    shape = (-1, mine.count, -1, -1)
    sample = [rows(x, drawn).flatten(0, 1).unsqueeze(1).expand(shape) for x in (k, v)]
    out, total = partial(mine.blocks(q), *sample, scale, bias.unsqueeze(2))
    return mine.back(out), mine.back(total)


def grid(queries: int, keys: int, dim: int) -> list[dict[str, Any]]:
    """The settings to search."""
    blocks = [block for block in (16, 32, 64, 128, 256) if block <= keys // 4]
    counts = [sampled for sampled in (32, 64, 128, 256, 512) if sampled <= keys // 2]
    return [{"block": block, "sampled": sampled} for block, sampled in product(blocks, counts)]
