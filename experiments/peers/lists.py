"""One list of keys for all queries of a head: LevAttention, and two controls."""

from __future__ import annotations

from typing import Any

import torch
from experiments.peers.parts import check_encoder, listed
from torch import Tensor

from fewkeys.papers import levattention


def leverage(
    q: Tensor, k: Tensor, v: Tensor, *, scale: float, is_causal: bool, generator: torch.Generator,
    kept: int, centre: bool,
) -> Tensor:  # fmt: skip
    """LevAttention: the keys of largest leverage score (Kannan et al., arXiv 2410.05462); `centre`: ours."""
    check_encoder(is_causal)
    key = k - k.mean(2, keepdim=True) if centre else k
    return listed(q, k, v, levattention.leverage_scores(key).topk(min(kept, k.shape[2]), -1).indices, scale)


def norm(
    q: Tensor, k: Tensor, v: Tensor, *, scale: float, is_causal: bool, generator: torch.Generator, kept: int
) -> Tensor:
    """A control: the longest keys."""
    check_encoder(is_causal)
    return listed(q, k, v, k.square().sum(-1).topk(min(kept, k.shape[2]), -1).indices, scale)


def chance(
    q: Tensor, k: Tensor, v: Tensor, *, scale: float, is_causal: bool, generator: torch.Generator, kept: int
) -> Tensor:
    """A control: keys drawn uniformly, without replacement."""
    check_encoder(is_causal)
    index = torch.rand(k.shape[:3], generator=generator).topk(min(kept, k.shape[2]), -1).indices
    return listed(q, k, v, index, scale)


def grid(queries: int, keys: int, dim: int) -> list[dict[str, Any]]:
    """Numbers of keys that the controls keep."""
    return [{"kept": kept} for kept in (16, 32, 64, 128, 256, 512, 1024) if kept <= keys // 2]


def leverage_grid(queries: int, keys: int, dim: int) -> list[dict[str, Any]]:
    """The settings to search."""
    return [{**more, "centre": centre} for more in grid(queries, keys, dim) for centre in (False, True)]
