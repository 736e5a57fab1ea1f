"""Sparsefinder by blocks: clusters join whole blocks of tokens."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fewkeys.core.graph import Graph
from fewkeys.core.inputs import Inputs
from fewkeys.core.validation import check_count
from fewkeys.core.work import Work
from fewkeys.papers.sparsefinder.groups import Groups
from fewkeys.papers.sparsefinder.space import Centroids, Projection, check_space, projected, space_work
from fewkeys.select.base import Selector
from fewkeys.select.recent import RecentBlocks


@dataclass(frozen=True)
class BlockClusters(Selector):
    """(i, j) is an edge when a cluster has the blocks of query i and of key j, or the blocks are neighbours.

    Blocks have `size` positions, a power of two, and are represented by the mean of their projected real tokens. A
    cluster has the `top` query blocks and the `top` key blocks nearest to its centroid, by Euclidean distance: of all
    blocks (the paper's version 1), or with `inside` of those for which it is the nearest centroid (version 2). A window
    of `window` blocks, an odd number with the query's block in the middle, is added as in BigBird; the clusters take
    the place of BigBird's random blocks.

    `project` maps tokens to the space in which `centroids` were fitted; None: the space is q and k as they are.
    Not causal: a block's mean has all its tokens, and later blocks compete for the centroid. No randomness.

    Cost O(n r (D + centroids / size)) to choose, at most `size window + top size` keys a centroid per query.

    Source: Treviso et al., Sparsefinder (arXiv 2109.12188), section 5 and appendix, the block versions.
    """

    size: int
    top: int
    centroids: Centroids
    project: Projection | None = None
    inside: bool = False
    window: int = 3

    def __post_init__(self) -> None:
        RecentBlocks(check_count("BlockClusters size", self.size))
        check_count("BlockClusters top", self.top)
        check_count("BlockClusters window", self.window)
        if self.window % 2 == 0:
            raise ValueError(f"BlockClusters window: expected an odd number of blocks, got {self.window}; add one")
        if self.centroids is None:
            raise TypeError("centroids: expected Centroids, got None; fit them on captured queries and keys")
        check_space(self.project, self.centroids)

    @property
    def causal(self) -> bool:
        return False

    @property
    def _near(self) -> RecentBlocks:
        return RecentBlocks(self.size, self.window // 2 + 1)

    def select(self, inputs: Inputs) -> Graph:
        x = inputs
        query, key = projected(x, self.project)
        (centroids,) = self.centroids.for_rows(query)
        query = self._ids(query, x.valid_queries, x.offset, centroids)
        key = self._ids(key, x.valid, 0, centroids)
        return self._near.select(x) | Graph(x, extra=Groups(query, key, self.centroids.size))

    def _ids(self, rows: Tensor, real: Tensor | None, offset: int, centroids: Tensor) -> Tensor:
        """The ids (B, Hq, N, M) of rows (B, Hq, N, r) whose first one stands at `offset`."""
        block = (torch.arange(rows.shape[2], device=rows.device) + offset) // self.size - offset // self.size
        flags = rows.new_ones((rows.shape[0], rows.shape[2])) if real is None else real.to(rows.dtype)
        total = rows.new_zeros((*rows.shape[:2], int(block[-1]) + 1, rows.shape[3]))
        total.index_add_(2, block, rows * flags[:, None, :, None])
        count = flags.new_zeros((rows.shape[0], total.shape[2])).index_add_(1, block, flags)
        mean = total / count.clamp_min(1)[:, None, :, None]
        # -|x - c|^2 / 2, which compares blocks as well as centroids.
        closeness = mean @ centroids.mT - 0.5 * centroids.square().sum(-1).unsqueeze(-2)
        closeness = closeness - 0.5 * mean.square().sum(-1, keepdim=True)
        if self.inside:
            closeness = closeness.masked_fill(closeness < closeness.amax(-1, keepdim=True), -torch.inf)
        member = nearest_members(closeness, count > 0, self.top)
        return member_ids(member)[:, :, block]

    def covers(self, inputs: Inputs) -> bool:
        return self._near.covers(inputs)

    def work(self, inputs: Inputs) -> Work:
        # A query block is in top centroids / blocks clusters on average.
        blocks = max(1.0, inputs.queries / self.size)
        clusters = self.centroids.size * min(1.0, self.top / blocks)
        rank, prepare = space_work(inputs, self.project)
        choose = 4.0 * rank * self.centroids.size / self.size * inputs.gqa_ratio
        return Work(self.size * (self.window + clusters * self.top), prepare + choose)


def member_ids(member: Tensor) -> Tensor:
    """Ids (B, H, N, M), -1 for none, of the groups that `member` (B, H, N, C, bool) marks; M is the largest number.

    Cost O(n C).
    """
    groups = member.shape[-1]
    most = int(member.sum(-1).max()) if member.numel() else 0
    ids = torch.where(member, torch.arange(groups, device=member.device), -1)
    return ids.topk(most, -1).values


def nearest_members(closeness: Tensor, real: Tensor | None, count: int | Tensor) -> Tensor:
    """Whether a row is among the `count` real rows that are nearest to a group: bool (B, H, N, C).

    `closeness` (B, H, N, C), the larger the nearer; `real` (B, N); `count` a number, or one for each sequence (B,).
    """
    rows = closeness.shape[2]
    most = min(rows, count if isinstance(count, int) else int(count.max()))
    if real is not None:
        closeness = closeness.masked_fill(~real[:, None, :, None], -torch.inf)
    top = closeness.topk(most, 2)
    taken = top.values > -torch.inf
    if isinstance(count, Tensor):
        taken = taken & (torch.arange(most, device=closeness.device)[:, None] < count[:, None, None, None])
    return torch.zeros_like(closeness, dtype=torch.bool).scatter_(2, top.indices, taken)
