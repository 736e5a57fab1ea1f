"""Clusters of queries and keys around shared centroids."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import normalize

from fewkeys.core.graph import Graph
from fewkeys.core.inputs import Inputs
from fewkeys.core.validation import check_count
from fewkeys.core.work import Work
from fewkeys.papers.sparsefinder.groups import Groups, member_ids
from fewkeys.papers.sparsefinder.space import Centroids, Projection, check_space, projected, space_work
from fewkeys.select.base import Selector

LLOYD_STEPS = 4


@dataclass(frozen=True)
class Routing(Selector, listed=True):
    """(i, j) is an edge when query i and key j are in one cluster.

    Queries and keys are brought to unit length (the paper's layer norm without scale and bias also subtracts the mean
    of the features). Balanced, as the paper runs it, each of C clusters has the `ceil(n / C)` queries and the
    `ceil(n / C)` keys nearest to its centroid; a token may be in several clusters or in none. Otherwise a token is in
    the cluster of its nearest centroid, the paper's definition.

    Args:
        clusters: C, the number of centroids.
        balanced: groups of equal size.
        centroids: given ones, `clusters` for each query head; None: four steps of spherical k-means, per sequence and
            query head, on its queries and keys together, from evenly spaced ones. The paper learns them in training,
            by a moving average.
        project: the space of queries, keys and centroids; None: as they are.

    Under causality only nearest given centroids are allowed: everything else looks at later tokens (the paper's
    balanced groups do). No randomness. Cost O(n D clusters + n^2 D / clusters).

    Source: Roy, Saffar, Vaswani, Grangier, Routing Transformer (arXiv 2003.05997), section 4.1 and algorithm 1.
    """

    clusters: int
    balanced: bool = True
    centroids: Centroids | None = None
    project: Projection | None = None

    def __post_init__(self) -> None:
        check_count("Routing clusters", self.clusters)
        check_space(self.project, self.centroids)
        if self.centroids is not None and self.centroids.size != self.clusters:
            raise ValueError(
                f"Routing clusters: expected the number of centroids given, {self.centroids.size}, got {self.clusters}"
            )

    @property
    def causal(self) -> bool:
        return self.centroids is not None and not self.balanced

    def select(self, inputs: Inputs) -> Graph:
        x = inputs
        query, key = (normalize(rows, dim=-1) for rows in projected(x, self.project))
        if self.centroids is None:
            centroids = spherical_means(query, key, x.valid_queries, x.valid, self.clusters)
        else:
            centroids = normalize(self.centroids.for_rows(query)[0], dim=-1)
        query, key = (self._ids(rows @ centroids.mT, real) for rows, real in ((query, x.valid_queries), (key, x.valid)))
        return Graph(x, extra=Groups(query, key, self.clusters))

    def _ids(self, closeness: Tensor, real: Tensor | None) -> Tensor:
        if not self.balanced:
            return closeness.argmax(-1, keepdim=True)
        capacity: int | Tensor = -(-closeness.shape[2] // self.clusters)
        if real is not None:
            capacity = (real.sum(-1) + self.clusters - 1) // self.clusters
        return member_ids(nearest_members(closeness, real, capacity))

    def covers(self, inputs: Inputs) -> bool:
        return self.clusters == 1

    def work(self, inputs: Inputs) -> Work:
        rank, prepare = space_work(inputs, self.project)
        passes = 1 if self.centroids is not None else 1 + LLOYD_STEPS
        return Work(inputs.keys / self.clusters, prepare + 4.0 * passes * rank * self.clusters * inputs.gqa_ratio)


def spherical_means(
    query: Tensor, key: Tensor, valid_queries: Tensor | None, valid: Tensor | None, count: int
) -> Tensor:
    """`count` unit centroids (B, H, C, r) of unit queries (B, H, Nq, r) and keys (B, H, Nk, r) together.

    Lloyd's steps by cosine; a centroid that loses all its rows stays where it is. Cost O(n C r) a step.
    """
    rows = torch.cat([query, key], 2)
    real = torch.ones((rows.shape[0], rows.shape[2]), dtype=torch.bool, device=rows.device)
    if valid_queries is not None:
        real[:, : query.shape[2]] = valid_queries
    if valid is not None:
        real[:, query.shape[2] :] = valid
    # Evenly spaced over the real queries and then the real keys.
    last = real.sum(-1, keepdim=True).clamp_min(1) - 1
    rank = (last * torch.linspace(0, 1, count, dtype=torch.float64, device=rows.device)).round().long()
    start = real.to(torch.int8).argsort(dim=-1, descending=True, stable=True).gather(-1, rank)
    centroids = rows.gather(2, start[:, None, :, None].expand(-1, rows.shape[1], -1, rows.shape[3]))
    for _ in range(LLOYD_STEPS):
        label = (rows @ centroids.mT).argmax(-1, keepdim=True).masked_fill(~real[:, None, :, None], count)
        total = rows.new_zeros((*rows.shape[:2], count + 1, rows.shape[3]))
        total.scatter_add_(2, label.expand_as(rows), rows)
        mean = total[:, :, :count]
        centroids = torch.where((mean != 0).any(-1, keepdim=True), normalize(mean, dim=-1), centroids)
    return centroids


def nearest_members(near: Tensor, real: Tensor | None, count: int | Tensor) -> Tensor:
    """Whether a row is among the `count` (or (B,)) rows of largest `near` (B, H, N, C) of a group; `real` (B, N)."""
    if real is not None:
        near = near.masked_fill(~real[:, None, :, None], -torch.inf)
    capacity = torch.as_tensor(count, device=near.device).view(-1, 1, 1, 1)
    top = near.topk(min(near.shape[2], int(capacity.max())), 2)
    place = torch.arange(top.indices.shape[2], device=near.device)[:, None]
    taken = (top.values > -torch.inf) & (place < capacity)
    return torch.zeros_like(near, dtype=torch.bool).scatter_(2, top.indices, taken)
