"""Caches pruned by a score of every key: SnapKV, Expected Attention, Compactor. Ours, after the papers.

The papers score once, after the prompt. Here keys are scored again before every `block` queries, and any key of the
past may be chosen, which favours the rivals. The keys of the block are kept too, and counted.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from experiments.decoders.attend import Look
from torch import Tensor
from torch.nn.functional import max_pool1d

SINKS, RECENT = 4, 32


class Score(Protocol):
    """Scores (Hkv, T) of past keys (Hkv, T, D) and values (Hkv, T, Dv), from past scaled queries (Hkv, G, T, D)."""

    def __call__(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor: ...


@dataclass(frozen=True)
class Scored:
    """Keeps the first keys, the latest ones, and the others of largest score: `slots` on average."""

    slots: int
    score: Score
    block: int = 32

    def __call__(self, query: Tensor, key: Tensor, value: Tensor) -> Iterator[Look]:
        room = self.slots - (self.block + 2) // 2
        for start in range(0, key.shape[1], self.block):
            stop = min(start + self.block, key.shape[1])
            kept = torch.ones(len(key), query.shape[1], stop - start, stop, dtype=torch.bool)
            if start > room:
                worth = self.score(query[:, :, :start], key[:, :start], value[:, :start]).clone()
                recent = min(RECENT, room // 2)
                worth[:, :SINKS] = worth[:, start - recent :] = torch.inf
                chosen = torch.zeros(worth.shape, dtype=torch.bool).scatter(-1, worth.topk(room, -1).indices, True)
                kept[..., :start] = chosen[:, None, None]
            yield Look(start, stop, kept, torch.zeros(kept.shape[:-1], dtype=torch.int64))


def votes(query: Tensor, key: Tensor, value: Tensor, window: int = 32, pool: int = 7) -> Tensor:
    """The weights of the latest queries, pooled over neighbours (Li et al., "SnapKV", arXiv 2404.14469, section 4)."""
    window = min(window, key.shape[1])
    score = query[:, :, -window:] @ key[:, None].mT
    late = torch.ones(window, window, dtype=torch.bool).triu(1)
    score[..., -window:] = score[..., -window:].masked_fill(late, -torch.inf)
    return max_pool1d(score.softmax(-1).sum((1, 2)), pool, stride=1, padding=pool // 2)


def expected(query: Tensor, key: Tensor, value: Tensor, window: int = 512) -> Tensor:
    """The weight that a normal query like the latest gives to a key, times |v| (arXiv 2510.00636, section 3).

    `exp(m . k + k^T C k / 2)`, m and C of the latest queries. The paper models queries before rotation and rotates the
    model to future positions; here the model is that of the latest rotated queries.
    """
    late = query[:, :, -window:]
    mean = late.mean(2, keepdim=True)
    moved = late - mean
    covariance = moved.mT @ moved / late.shape[2]
    level = (key[:, None] * mean).sum(-1) + ((key[:, None] @ covariance) * key[:, None]).sum(-1) / 2
    return level.softmax(-1).mean(1) * value.norm(dim=-1)


def compactor(query: Tensor, key: Tensor, value: Tensor, chunk: int = 256) -> Tensor:
    """Leverage of keys and attention without a mask inside chunks, standardised and added (arXiv 2507.08143)."""
    gram = key.mT @ key
    ridge = 1e-4 * gram.diagonal(dim1=-2, dim2=-1).mean(-1)[:, None, None] * torch.eye(key.shape[-1])
    leverage = (torch.linalg.solve(gram + ridge, key.mT).mT * key).sum(-1)
    weight = [
        (mine @ yours[:, None].mT).softmax(-1).mean((1, 2)) * yours.shape[1]
        for mine, yours in zip(query.split(chunk, 2), key.split(chunk, 1), strict=True)
    ]
    scores = [
        (part - part.mean(-1, keepdim=True)) / part.std(-1, keepdim=True) for part in (leverage, torch.cat(weight, 1))
    ]
    return scores[0] + scores[1]
