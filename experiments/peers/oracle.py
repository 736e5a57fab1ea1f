"""Each query's keys of largest score: a bound for methods that keep keys. It computes all scores and is not timed."""

from __future__ import annotations

import torch
from experiments.peers.parts import check_encoder
from torch import Tensor

CHUNK = 512
"""Queries at a time."""


def attend(
    q: Tensor, k: Tensor, v: Tensor, *, scale: float, is_causal: bool, generator: torch.Generator, kept: int
) -> Tensor:
    """Attention to the `kept` best keys of every query, renormalised."""
    check_encoder(is_causal)
    return torch.cat([_best(part, k, v, scale, kept) for part in q.split(CHUNK, 2)], 2)


def _best(q: Tensor, k: Tensor, v: Tensor, scale: float, kept: int) -> Tensor:
    score = scale * q @ k.mT
    best = score.topk(min(kept, k.shape[2]), -1)
    weights = torch.zeros_like(score).scatter_(-1, best.indices, best.values.softmax(-1))
    return weights @ v
