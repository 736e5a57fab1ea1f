"""Pre-Scoring: the keys of largest score, and HyperAttention's blocks among these alone. Ours, after the paper.

"k-means": the keys nearest to their means, D + 1 clusters, so that a key with a cluster to itself comes first;
"leverage": largest leverage scores. `block` 0: all queries attend to all kept keys. Nothing represents the other keys,
as in the paper, which replaces the sample by the scores. Cost O(n D^2 + n min(block, kept) D).

Source: Li, Wang, Bao, Woodruff, "Efficient Attention via Pre-Scoring" (arXiv 2505.11040), sections 3 and 4.
"""

from __future__ import annotations

from itertools import product
from typing import Any

import torch
from experiments.peers.blocks import beside, hashed
from experiments.peers.hyperattention import PLANES
from experiments.peers.parts import check_encoder, k_means, listed, rows
from torch import Tensor

from fewkeys.papers import levattention


def attend(
    q: Tensor, k: Tensor, v: Tensor, *, scale: float, is_causal: bool, generator: torch.Generator,
    kept: int, score: str = "k-means", block: int = 0, rounds: int = 3,
) -> Tensor:  # fmt: skip
    """Attention to `kept` keys, or to blocks of them."""
    check_encoder(is_causal)
    if score == "leverage":
        worth = levattention.leverage_scores(k)
    else:
        cluster, means = k_means(k, min(k.shape[-1] + 1, k.shape[2]), rounds, generator)
        worth = -(k - rows(means, cluster)).square().sum(-1)
    index = worth.topk(min(kept, k.shape[2]), -1).indices
    if not block:
        return listed(q, k, v, index, scale)
    key, value = rows(k, index), rows(v, index)
    return beside(q, key, value, hashed(q, key, block, PLANES, generator), scale)[0]


def grid(queries: int, keys: int, dim: int) -> list[dict[str, Any]]:
    """The settings to search."""
    sizes = [kept for kept in (32, 64, 128, 256, 512, 1024) if kept <= keys // 2]
    return [
        {"kept": kept, "score": score, "block": block}
        for kept, score, block in product(sizes, ("k-means", "leverage"), (0, 32, 128))
        if block <= kept // 2
    ]
