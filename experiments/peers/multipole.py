"""Multipole Attention: cluster means, and for every query the keys of its best clusters. Ours, after the paper.

Keys are clustered by k-means; a query scores all means, `s_c = scale <q, mean k_c> + log n_c`, attends exactly to the
keys of the `expand` clusters of largest s_c, and to all the others through their mean value with logit s_c. Queries
that expand the same cluster are answered together, 32 at a time. Cost O(n (clusters + expand largest cluster) D).

Source: Hooper et al., "Multipole Attention for Efficient Long Context Reasoning" (arXiv 2506.13059), section 3.
"""

from __future__ import annotations

from itertools import product
from typing import Any

import torch
from experiments.peers.parts import averages, check_encoder, k_means, merge, partial
from torch import Tensor

TOGETHER = 32
PIECES = 8
"""Blocks of queries are answered in this many pieces, sorted by the size of their cluster, to pad little."""


def attend(
    q: Tensor, k: Tensor, v: Tensor, *, scale: float, is_causal: bool, generator: torch.Generator,
    clusters: int, expand: int, rounds: int = 3,
) -> Tensor:  # fmt: skip
    """Attention with `clusters` clusters, of which every query expands `expand`."""
    check_encoder(is_causal)
    cluster, _ = k_means(k, clusters, rounds, generator)
    (mean, size), (value, _) = averages(k, cluster, clusters), averages(v, cluster, clusters)
    level = size.log().unsqueeze(2)
    if not expand:
        return partial(q, mean, value, scale, level)[0]
    score = torch.baddbmm(level.flatten(0, 1), q.flatten(0, 1), mean.flatten(0, 1).mT, alpha=scale)
    score = score.view(*q.shape[:3], clusters)
    best = score.topk(expand, -1).indices
    bias = level.expand(score.shape).scatter(-1, best, -torch.inf)
    exact = expanded(q, k, v, cluster, best, clusters, scale)
    return merge([partial(q, mean, value, scale, bias), *exact])


def expanded(
    q: Tensor, k: Tensor, v: Tensor, cluster: Tensor, best: Tensor, clusters: int, scale: float
) -> list[tuple[Tensor, Tensor]]:
    """Attention of every query to each of its clusters `best` (B, H, N, b), a part for each rank."""
    heads = q.shape[0] * q.shape[1]
    at = torch.arange(heads).view(*q.shape[:2], 1) * clusters
    keys, count = _lists((cluster + at).flatten(), heads * clusters)
    pair = (best + at.unsqueeze(-1)).flatten()  # the cluster of every (query, rank)
    order = pair.argsort(stable=True)
    asked = torch.bincount(pair, minlength=heads * clusters)
    blocks = (asked + TOGETHER - 1) // TOGETHER
    rank = torch.arange(len(pair)) - (asked.cumsum(0) - asked)[pair[order]]
    place = torch.empty_like(pair)
    place[order] = (blocks.cumsum(0) - blocks)[pair[order]] * TOGETHER + rank
    total = int(blocks.sum())
    query = torch.zeros(total * TOGETHER, dtype=torch.int64).scatter_(
        0, place, torch.arange(len(pair)) // best.shape[-1]
    )
    whose = torch.arange(heads * clusters).repeat_interleave(blocks)
    flat = [x.flatten(0, 2) for x in (q, k, v)]
    out, sums = torch.empty(total, TOGETHER, v.shape[-1]), torch.empty(total, TOGETHER)
    for piece in count[whose].argsort().chunk(PIECES):
        mine = whose[piece]
        index = keys[mine, : max(1, int(count[mine].max()))]
        hidden = torch.zeros(index.shape).masked_fill(index < 0, -torch.inf)[:, None, None]
        inputs = flat[0][query.view(total, TOGETHER)[piece]], *(x[index.clamp_min(0)] for x in flat[1:])
        part = partial(*(x.unsqueeze(1) for x in inputs), scale, hidden)
        out[piece], sums[piece] = (x.squeeze(1) for x in part)
    out, sums = out.flatten(0, 1)[place].view(*best.shape, -1), sums.flatten()[place].view(best.shape)
    return [(out[..., rank, :], sums[..., rank]) for rank in range(best.shape[-1])]


def _lists(cluster: Tensor, clusters: int) -> tuple[Tensor, Tensor]:
    """The rows of every cluster (C, most), -1 where there are fewer, and their number."""
    count = torch.bincount(cluster, minlength=clusters)
    order = cluster.argsort(stable=True)
    rank = torch.arange(len(cluster)) - (count.cumsum(0) - count)[cluster[order]]
    lists = torch.full((clusters, int(count.max())), -1)
    lists[cluster[order], rank] = order
    return lists, count


def grid(queries: int, keys: int, dim: int) -> list[dict[str, Any]]:
    """The settings to search."""
    sizes = [clusters for clusters in (16, 32, 64, 128, 256, 512) if keys // 64 <= clusters <= keys // 4]
    return [
        {"clusters": clusters, "expand": expand, "rounds": rounds}
        for clusters, expand, rounds in product(sizes, (0, 1, 2, 4, 8), (1, 3))
    ]
