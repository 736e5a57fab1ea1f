"""Selectors that join queries and keys of one space: by distance, buckets, clusters, clusters of blocks.

Source: Sparsefinder (arXiv 2109.12188), section 3.3; section 5 and appendix for blocks.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass, field, fields
from typing import ClassVar, Literal, get_args

import torch
from torch import Tensor

from fewkeys.core.graph import Graph, query_blocks, visible
from fewkeys.core.inputs import Inputs
from fewkeys.core.validation import check_count, check_real
from fewkeys.core.work import Work
from fewkeys.papers.sparsefinder.groups import Groups, member_ids
from fewkeys.papers.sparsefinder.patterns import listed
from fewkeys.papers.sparsefinder.space import (
    Centroids,
    Edges,
    Fitted,
    Joined,
    Projection,
    centred,
    check_space,
    closeness,
    nearest,
    projected,
    space_work,
)
from fewkeys.select.base import Selector
from fewkeys.select.recent import RecentBlocks

Kind = Literal["equal_size", "uniform"]


@dataclass(frozen=True)
class Grouping(Selector, ABC, listed=False):
    """The edges that a rule predicts between queries and keys of one layer. Cost O(n D r), then the rule's own.

    Args:
        project: the space of the layer's query heads; None: q and k as they are.
        fitted: what the rule learned of the space. `Sparsefinder.selector` sets both.
    """

    project: Projection | None = field(default=None, kw_only=True)
    fitted: Fitted | None = field(default=None, kw_only=True)
    learns: ClassVar[type[Fitted] | None] = None
    """The class of `fitted`."""

    @property
    def size(self) -> int:
        """The `size` of `fitted`."""
        return 0

    def __post_init__(self) -> None:
        check_space(self.project, self.fitted)
        if self.fitted is None:
            return
        if self.learns is None or not isinstance(self.fitted, self.learns):
            expected = "None" if self.learns is None else self.learns.__name__
            raise TypeError(f"fitted: expected {expected} for {self.rule}, got {type(self.fitted).__name__}")
        if self.fitted.size != self.size:
            raise ValueError(f"fitted: expected {self.size} for each head for {self.rule}, got {self.fitted}")

    def select(self, inputs: Inputs) -> Graph:
        return self.joined(inputs, *projected(inputs, self.project))

    @abstractmethod
    def joined(self, inputs: Inputs, query: Tensor, key: Tensor) -> Graph:
        """The edges between projected queries (B, Hq, Nq, r) and keys (B, Hq, Nk, r)."""

    def fitted_for(self, rows: Tensor) -> list[Tensor]:
        """The tensors of `fitted` for rows (B, Hq, N, r)."""
        if self.fitted is None:
            raise ValueError(f"fitted: expected values for {self.rule}, got None; use Sparsefinder.selector")
        return self.fitted.for_rows(rows)

    def covers(self, inputs: Inputs) -> bool:
        return False

    @property
    def causal(self) -> bool:
        return True

    @abstractmethod
    def density(self, inputs: Inputs, rank: int) -> tuple[float, float]:
        """The expected share of pairs that are edges, and operations of choosing them per key and query head."""

    def work(self, inputs: Inputs) -> Work:
        rank, space = space_work(inputs, self.project)
        share, choose = self.density(inputs, rank)
        return Work(inputs.keys * share, choose * inputs.gqa_ratio + space)

    @property
    def rule(self) -> str:
        """The class and its options, without the space."""
        options = [f"{f.name}={getattr(self, f.name)!r}" for f in fields(self) if not f.kw_only]
        return f"{type(self).__name__}({', '.join(options)})"

    def __str__(self) -> str:
        return f"{self.rule} {'as they are' if self.project is None else f'in {self.project.rank} dimensions'}"


@dataclass(frozen=True)
class Distance(Grouping):
    """(i, j) is an edge when `|q'_i - k'_j| <= t`. Cost O(n^2 r): a bound on what the space can give."""

    t: float
    is_oracle: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_real("Distance t", self.t, above=0.0)
        super().__post_init__()

    def joined(self, inputs: Inputs, query: Tensor, key: Tensor) -> Graph:
        def mask(start: int, stop: int) -> Tensor:
            # A matrix product would round to the size of the tokens, not of their differences.
            distance = torch.cdist(query[:, :, start:stop], key, compute_mode="donot_use_mm_for_euclid_dist")
            return (distance <= self.t) & visible(inputs, start, stop)

        return listed(inputs, (mask(start, stop) for start, stop in query_blocks(inputs)))

    def density(self, inputs: Inputs, rank: int) -> tuple[float, float]:
        return 1.0, 2.0 * rank * inputs.queries


@dataclass(frozen=True)
class Buckets(Grouping):
    """(i, j) is an edge when q'_i and k'_j share one of `beta` buckets in *any* of the r dimensions.

    kind "equal_size": in every dimension the n sorted queries of a sequence fill buckets of `ceil(n / beta)`, and so do
    the keys; causal and cross-attention use `fitted` quantiles. "uniform": `floor(beta (tanh(x) + 1) / 2)`. Cost
    O(n r log n) to choose; up to `1 - (1 - 1 / beta)^r` of the pairs are edges.
    """

    beta: int
    kind: Kind = "equal_size"
    learns: ClassVar[type[Fitted] | None] = Edges

    def __post_init__(self) -> None:
        check_count("Buckets beta", self.beta)
        if self.kind not in get_args(Kind):
            raise ValueError(f"Buckets kind: expected 'equal_size' or 'uniform', got {self.kind!r}")
        super().__post_init__()

    @property
    def size(self) -> int:
        return self.beta - 1

    def joined(self, inputs: Inputs, query: Tensor, key: Tensor) -> Graph:
        x, sides = inputs, (query, key)
        if self.kind == "uniform":
            bins = [((rows.tanh() + 1) * (self.beta / 2)).long().clamp_max(self.beta - 1) for rows in sides]
        elif self.fitted is not None:
            bins = [_between(rows, edges) for rows, edges in zip(sides, self.fitted_for(query), strict=True)]
        else:
            bins = [_by_rank(rows, real, self.beta) for rows, real in ((query, x.valid_queries), (key, x.valid))]
        first = torch.arange(query.shape[-1], device=query.device) * self.beta
        return _grouped(x, bins[0] + first, bins[1] + first, query.shape[-1] * self.beta)

    def covers(self, inputs: Inputs) -> bool:
        return self.beta == 1

    @property
    def causal(self) -> bool:
        return self.kind != "equal_size" or self.fitted is not None

    def density(self, inputs: Inputs, rank: int) -> tuple[float, float]:
        return 1 - (1 - 1 / self.beta) ** rank, 20.0 * rank


@dataclass(frozen=True)
class Clusters(Grouping):
    """(i, j) is an edge when one of the `top` centroids nearest to q'_i is one of the `top` nearest to k'_j.

    `count` centroids per head are fitted by k-means on queries and keys together; edges of `rounds` such sets, from
    different seeds, are united. Cost O(n count r rounds) to choose; about `rounds top^2 / count` of the pairs are
    edges: with count = sqrt(n), O(n sqrt n) in all.
    """

    count: int
    top: int = 1
    rounds: int = 1
    learns: ClassVar[type[Fitted] | None] = Centroids

    def __post_init__(self) -> None:
        for name in ("count", "top", "rounds"):
            check_count(f"Clusters {name}", getattr(self, name))
        if self.top > self.count:
            raise ValueError(f"Clusters top: expected at most the count, {self.count}, got {self.top}")
        super().__post_init__()

    @property
    def size(self) -> int:
        return self.count * self.rounds

    def joined(self, inputs: Inputs, query: Tensor, key: Tensor) -> Graph:
        (places,) = self.fitted_for(query)

        def ids(rows: Tensor) -> Tensor:
            rounds = enumerate(places.split(self.count, 1))
            return torch.cat([nearest(rows, place, self.top) + i * self.count for i, place in rounds], -1)

        return _grouped(inputs, ids(query), ids(key), self.size)

    def covers(self, inputs: Inputs) -> bool:
        return self.top == self.count

    def density(self, inputs: Inputs, rank: int) -> tuple[float, float]:
        return min(1.0, self.rounds * self.top**2 / self.count), 4.0 * rank * self.count * self.rounds


@dataclass(frozen=True)
class ClusterPairs(Grouping):
    """(i, j) is an edge when the cluster of q'_i is joined to the cluster of k'_j.

    Queries have `count` clusters, keys `count` others. Clusters are joined if their share of a head's gold edges in the
    capture is at least `lift` times their share of all pairs of tokens; the pair with the largest ratio always is. So
    gold edges need not be near if they are regular. Cost O(n count r) to choose. Ours, not the paper's.
    """

    count: int
    lift: float
    learns: ClassVar[type[Fitted] | None] = Joined

    def __post_init__(self) -> None:
        check_count("ClusterPairs count", self.count)
        check_real("ClusterPairs lift", self.lift, above=0.0)
        super().__post_init__()

    @property
    def size(self) -> int:
        return self.count

    def joined(self, inputs: Inputs, query: Tensor, key: Tensor) -> Graph:
        query_places, key_places, pairs = self.fitted_for(query)
        # The groups are the clusters of keys; a query is in those that its cluster is joined to.
        groups = member_ids(pairs > 0).expand(*query.shape[:2], -1, -1)
        ids = groups.gather(2, nearest(query, query_places).expand(-1, -1, -1, groups.shape[-1]))
        return _grouped(inputs, ids, nearest(key, key_places), self.count)

    def density(self, inputs: Inputs, rank: int) -> tuple[float, float]:
        share = float(self.fitted.pairs.double().mean()) if isinstance(self.fitted, Joined) else 1.0
        return share, 4.0 * rank * self.count


@dataclass(frozen=True)
class BlockClusters(Selector):
    """(i, j) is an edge when a cluster has the blocks of query i and of key j, or the blocks are neighbours.

    Blocks of `size` positions, a power of two, are represented by the mean of their projected real tokens. A cluster
    has the `top` query blocks and the `top` key blocks nearest to its centroid: of all blocks (version 1 of the paper),
    or with `inside` of those for which it is the nearest centroid (version 2). They replace BigBird's random blocks,
    beside its window of `window` blocks, an odd number. `project`: the space of `centroids`; None: q and k as they are.

    Not causal: a block's mean has all its tokens. Cost O(n r (D + centroids / size)) to choose, at most
    `size window + top size` keys a centroid per query.
    """

    size: int
    top: int
    centroids: Centroids
    project: Projection | None = None
    inside: bool = False
    window: int = 3

    def __post_init__(self) -> None:
        RecentBlocks(check_count("BlockClusters size", self.size))  # refuses what is no power of two
        check_count("BlockClusters top", self.top)
        if check_count("BlockClusters window", self.window) % 2 == 0:
            raise ValueError(f"BlockClusters window: expected an odd number of blocks, got {self.window}; add one")
        if not isinstance(self.centroids, Centroids):
            got = None if self.centroids is None else type(self.centroids).__name__
            raise TypeError(f"centroids: expected Centroids, got {got}; fit them on captured queries and keys")
        check_space(self.project, self.centroids)

    @property
    def _window(self) -> RecentBlocks:
        return RecentBlocks(self.size, self.window // 2 + 1)

    def select(self, inputs: Inputs) -> Graph:
        x = inputs
        query, key = projected(x, self.project)
        (centroids,) = self.centroids.for_rows(query)
        query = self._ids(query, x.valid_queries, x.offset, centroids)
        key = self._ids(key, x.valid, 0, centroids)
        return self._window.select(x) | Graph(x, extra=Groups(query, key, self.centroids.size))

    def _ids(self, rows: Tensor, real: Tensor | None, offset: int, centroids: Tensor) -> Tensor:
        """The ids (B, Hq, N, M) of rows (B, Hq, N, r) from position `offset` on."""
        block = (torch.arange(rows.shape[2], device=rows.device) + offset) // self.size - offset // self.size
        flags = rows.new_ones((rows.shape[0], rows.shape[2])) if real is None else real.to(rows.dtype)
        blocks = int(block[-1]) + 1
        total = rows.new_zeros((*rows.shape[:2], blocks, rows.shape[3]))
        total.index_add_(2, block, rows * flags[:, None, :, None])
        count = flags.new_zeros((rows.shape[0], blocks)).index_add_(1, block, flags)
        mean, centroids = centred(total / count.clamp_min(1)[:, None, :, None], centroids)
        # -|x - c|^2 / 2, which compares blocks as well as centroids.
        near = closeness(mean, centroids) - 0.5 * mean.square().sum(-1, keepdim=True)
        if self.inside:
            near = near.masked_fill(near < near.amax(-1, keepdim=True), -torch.inf)
        top = near.masked_fill((count == 0)[:, None, :, None], -torch.inf).topk(min(self.top, blocks), 2)
        member = torch.zeros_like(near, dtype=torch.bool).scatter_(2, top.indices, top.values > -torch.inf)
        return member_ids(member)[:, :, block]

    def covers(self, inputs: Inputs) -> bool:
        return self._window.covers(inputs)

    def work(self, inputs: Inputs) -> Work:
        # A query block is in top centroids / blocks clusters on average.
        blocks = max(1.0, inputs.queries / self.size)
        clusters = self.centroids.size * min(1.0, self.top / blocks)
        rank, prepare = space_work(inputs, self.project)
        choose = 4.0 * rank * self.centroids.size / self.size * inputs.gqa_ratio
        return Work(self.size * (self.window + clusters * self.top), prepare + choose)


def _grouped(inputs: Inputs, query: Tensor, key: Tensor, count: int) -> Graph:
    """The graph of groups (B, Hq, N, M); padded tokens are in none."""
    if inputs.valid is not None:
        key = key.masked_fill(~inputs.valid[:, None, :, None], -1)
    if inputs.valid_queries is not None:
        query = query.masked_fill(~inputs.valid_queries[:, None, :, None], -1)
    return Graph(inputs, extra=Groups(query, key, count))


def _between(rows: Tensor, edges: Tensor) -> Tensor:
    """How many of the edges (H, r, beta - 1) lie below each entry of rows (B, H, N, r)."""
    values = rows.permute(1, 3, 0, 2)
    buckets = torch.searchsorted(edges.contiguous(), values.flatten(2).contiguous())
    return buckets.view(values.shape).permute(2, 0, 3, 1)


def _by_rank(rows: Tensor, real: Tensor | None, beta: int) -> Tensor:
    """The bucket of each entry of rows (B, H, N, r), by its rank among the real ones."""
    count = torch.tensor(rows.shape[2], device=rows.device)
    if real is not None:
        rows = rows.masked_fill(~real[:, None, :, None], torch.inf)
        count = real.sum(-1)[:, None, None, None]
    rank = rows.argsort(dim=2, stable=True).argsort(dim=2)
    size = ((count + beta - 1) // beta).clamp_min(1)
    return (rank // size).clamp_max(beta - 1)
