"""Reformer: LSH attention in chunks. Our implementation after the paper.

In each round, queries and keys are hashed by `argmax [x R; -x R]` with a random R, sorted by bucket and place, and cut
into chunks; a chunk attends to its keys and those of the chunk before. Rounds are merged by the sums of their weights.
The paper ties queries to keys; here each is hashed separately. There are as many buckets as chunks. Cost O(rounds n
(chunk + buckets) D).

Source: Kitaev, Kaiser, Levskaya, "Reformer" (arXiv 2001.04451), section 2; hash: Andoni et al. (2015).
"""

from __future__ import annotations

from itertools import product
from typing import Any

import torch
from experiments.peers.blocks import Cut
from experiments.peers.parts import check_encoder, merge, partial
from torch import Tensor


def attend(
    q: Tensor, k: Tensor, v: Tensor, *, scale: float, is_causal: bool, generator: torch.Generator,
    chunk: int, rounds: int,
) -> Tensor:  # fmt: skip
    """Attention to two chunks of `chunk` keys in each of the rounds."""
    check_encoder(is_causal)
    count = -(-k.shape[2] // chunk)
    parts = []
    for _ in range(rounds):
        turn = torch.randn(q.shape[-1], max(1, count // 2), generator=generator)
        mine, yours = (Cut(bucket(x, turn).argsort(dim=-1, stable=True), count) for x in (q, k))
        bias = yours.bias()
        if bias is not None:
            bias = torch.cat([bias, bias.roll(1, 1)], -1)
        both = [torch.cat([x, x.roll(1, 1)], 2) for x in (yours.blocks(k), yours.blocks(v))]
        out, total = partial(mine.blocks(q), *both, scale, bias)
        parts.append((mine.back(out), mine.back(total)))
    return merge(parts)


def bucket(x: Tensor, turn: Tensor) -> Tensor:
    """The bucket (B, H, N) of every row: the nearest of the axes +-R."""
    side = x @ turn
    return torch.cat([side, -side], -1).argmax(-1)


def grid(queries: int, keys: int, dim: int) -> list[dict[str, Any]]:
    """The settings to search."""
    chunks = [chunk for chunk in (8, 16, 32, 64, 128, 256) if chunk <= keys // 4]
    return [{"chunk": chunk, "rounds": rounds} for chunk, rounds in product(chunks, (1, 2, 4, 8))]
