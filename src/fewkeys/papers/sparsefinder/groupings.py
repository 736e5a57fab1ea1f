"""Selectors that join queries and keys of one space: by distance, by shared buckets, by shared clusters.

Each takes queries (B, Hq, Nq, r) and keys (B, Hq, Nk, r) in the space of `project`; `fitted` is what was learned of
that space before. `Sparsefinder.selector` sets both. Source: Sparsefinder (arXiv 2109.12188), section 3.3.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from typing import ClassVar, Literal, get_args

import torch
from torch import Tensor

from fewkeys.core.graph import Graph, visible
from fewkeys.core.inputs import Inputs
from fewkeys.core.validation import check_count, check_real
from fewkeys.core.work import Work
from fewkeys.papers.sparsefinder.groups import Groups
from fewkeys.papers.sparsefinder.space import (
    Centroids,
    Edges,
    Fitted,
    Joined,
    Projection,
    check_space,
    nearest,
    projected,
    space_work,
)
from fewkeys.select.base import Selector
from fewkeys.select.rows import listed, query_blocks

Kind = Literal["equal_size", "uniform"]


@dataclass(frozen=True)
class Grouping(Selector, ABC, listed=False):
    """The edges that a rule predicts between queries and keys of one layer, in a learned space or as they are.

    Compared by content, saved with plans. No randomness, no gradient. Cost O(n D r) for the space, then the rule's own.

    Args:
        project: the space, of as many query heads as the layer has; None: q and k as they are.
        fitted: what the rule learned of the space; None: nothing yet, so that the rule can only be given to
            `Sparsefinder.selector`.
    """

    project: Projection | None = field(default=None, kw_only=True)
    fitted: Fitted | None = field(default=None, kw_only=True)
    learns: ClassVar[type[Fitted] | None] = None
    """The class of `fitted`."""

    @property
    def size(self) -> int:
        """How many values `fitted` has for each head, of one dimension where dimensions stand alone."""
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
        """The tensors of `fitted` for such rows (B, Hq, N, r)."""
        if self.fitted is None:
            raise ValueError(f"fitted: expected values for {self.rule}, got None; use Sparsefinder.selector")
        return self.fitted.for_rows(rows)

    @abstractmethod
    def density(self, inputs: Inputs, rank: int) -> tuple[float, float]:
        """The expected share of the pairs that are edges, and operations per key and query head of choosing them."""

    @property
    def causal(self) -> bool:
        return True

    def work(self, inputs: Inputs) -> Work:
        rank, space = space_work(inputs, self.project)
        share, choose = self.density(inputs, rank)
        return Work(inputs.keys * share, choose * inputs.gqa_ratio + space)

    @property
    def rule(self) -> str:
        """The rule without the space."""
        options = [f"{f.name}={getattr(self, f.name)!r}" for f in fields(self) if not f.kw_only]
        return f"{type(self).__name__}({', '.join(options)})"

    def __str__(self) -> str:
        return f"{self.rule} {'as they are' if self.project is None else f'in {self.project.rank} dimensions'}"


@dataclass(frozen=True)
class Distance(Grouping):
    """(i, j) is an edge when `|q'_i - k'_j| <= t`.

    Compares every pair, in r dimensions instead of D: O(n^2 r), and the graph has a list per query. A bound on the
    quality of the space; it saves no time.
    """

    t: float
    is_oracle: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_real("Distance t", self.t, above=0.0)
        super().__post_init__()

    def joined(self, inputs: Inputs, query: Tensor, key: Tensor) -> Graph:
        return listed(inputs, self._masks(inputs, query, key))

    def _masks(self, inputs: Inputs, query: Tensor, key: Tensor) -> Iterator[Tensor]:
        size = key.square().sum(-1).unsqueeze(-2)
        for start, stop in query_blocks(inputs):
            rows = query[:, :, start:stop]
            near = rows.square().sum(-1, keepdim=True) + size - 2 * (rows @ key.mT) <= self.t**2
            yield near & visible(inputs, start, stop)

    def covers(self, inputs: Inputs) -> bool:
        return False

    def density(self, inputs: Inputs, rank: int) -> tuple[float, float]:
        return 1.0, 2.0 * rank * inputs.queries


@dataclass(frozen=True)
class Buckets(Grouping):
    """(i, j) is an edge when q'_i and k'_j share one of `beta` buckets in *any* of the r dimensions.

    kind "equal_size": in every dimension the n queries of a sequence, sorted, fill buckets of `ceil(n / beta)`, and so
    do the keys; bucket b of queries is joined to bucket b of keys. Ranks depend on the whole sequence, so causal and
    cross-attention use `fitted` quantiles instead. kind "uniform": `floor(beta (tanh(x) + 1) / 2)`, which depends on no
    other token.

    Cost O(n r log n) to choose; a share of up to `1 - (1 - 1 / beta)^r` of the pairs are edges.
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
        x = inputs
        if self.kind == "uniform":
            bins = [((rows.tanh() + 1) * (self.beta / 2)).long().clamp_max(self.beta - 1) for rows in (query, key)]
        elif self.fitted is not None:
            bins = [_between(rows, bounds) for rows, bounds in zip((query, key), self.fitted_for(query), strict=True)]
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

    `count` centroids per head are fitted by k-means on queries and keys together. With `rounds` > 1 there are that
    many sets, from different seeds, and the edges are the union. Cost O(n count r rounds) to choose; a share of about
    `rounds top^2 / count` of the pairs are edges: with count = sqrt(n), O(n sqrt n) in all.
    """

    count: int
    top: int = 1
    rounds: int = 1
    learns: ClassVar[type[Fitted] | None] = Centroids

    def __post_init__(self) -> None:
        check_count("Clusters count", self.count)
        check_count("Clusters top", self.top)
        check_count("Clusters rounds", self.rounds)
        if self.top > self.count:
            raise ValueError(f"Clusters top: expected at most the count, {self.count}, got {self.top}")
        super().__post_init__()

    @property
    def size(self) -> int:
        return self.count * self.rounds

    def joined(self, inputs: Inputs, query: Tensor, key: Tensor) -> Graph:
        (places,) = self.fitted_for(query)
        sets = list(enumerate(places.split(self.count, 1)))
        ids = [
            torch.cat([nearest(rows, centres, self.top) + number * self.count for number, centres in sets], -1)
            for rows in (query, key)
        ]
        return _grouped(inputs, ids[0], ids[1], self.count * self.rounds)

    def covers(self, inputs: Inputs) -> bool:
        return self.top == self.count

    def density(self, inputs: Inputs, rank: int) -> tuple[float, float]:
        return min(1.0, self.rounds * self.top**2 / self.count), 4.0 * rank * self.count * self.rounds


@dataclass(frozen=True)
class ClusterPairs(Grouping):
    """(i, j) is an edge when the cluster of q'_i is joined to the cluster of k'_j.

    Queries have `count` clusters, and keys have `count` others. On the captured text, each head counts the share of
    gold edges between clusters a and b, and the share of all pairs of tokens between them. Clusters are joined if the
    first share is at least `lift` times the second; the pair with the largest ratio is always joined. So gold edges
    need not be near if they are regular: keys that all queries attend to are joined to all clusters of queries. One
    lift for all heads gives the largest mean recall for the mean number of edges: hard heads get more. Cost
    O(n count r) to choose.

    Ours, not the paper's, where a query is joined to the keys of its own cluster.
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
        # A group is a cluster of keys. A query is in the groups that its cluster is joined to.
        lists = torch.where(pairs > 0, torch.arange(self.count, device=query.device), -1)
        lists = lists.topk(int((pairs > 0).sum(-1).max()), -1).values.expand(*query.shape[:2], -1, -1)
        ids = lists.gather(2, nearest(query, query_places).expand(-1, -1, -1, lists.shape[-1]))
        return _grouped(inputs, ids, nearest(key, key_places), self.count)

    def covers(self, inputs: Inputs) -> bool:
        return False

    def density(self, inputs: Inputs, rank: int) -> tuple[float, float]:
        share = float(self.fitted.pairs.double().mean()) if isinstance(self.fitted, Joined) else 1.0
        return share, 4.0 * rank * self.count


def _grouped(inputs: Inputs, query: Tensor, key: Tensor, count: int) -> Graph:
    """The graph of groups (B, Hq, N, M) of queries and of keys; padded tokens are in no group."""
    ids = [
        rows if real is None else rows.masked_fill(~real[:, None, :, None], -1)
        for rows, real in ((query, inputs.valid_queries), (key, inputs.valid))
    ]
    return Graph(inputs, extra=Groups(ids[0], ids[1], count))


def _between(rows: Tensor, edges: Tensor) -> Tensor:
    """The bucket of each entry of rows (B, H, N, r): how many of the edges (H, r, beta - 1) lie below it."""
    values = rows.permute(1, 3, 0, 2)
    buckets = torch.searchsorted(edges.contiguous(), values.flatten(2).contiguous())
    return buckets.view(values.shape).permute(2, 0, 3, 1)


def _by_rank(rows: Tensor, real: Tensor | None, beta: int) -> Tensor:
    """The bucket of each entry of rows (B, H, N, r) by its rank among the real ones of its dimension."""
    count: int | Tensor = rows.shape[2]
    if real is not None:
        rows = rows.masked_fill(~real[:, None, :, None], torch.inf)
        count = real.sum(-1)[:, None, None, None]
    rank = rows.argsort(dim=2, stable=True).argsort(dim=2)
    size = (count + beta - 1) // beta
    bucket = rank // (size.clamp_min(1) if isinstance(size, Tensor) else size)
    return bucket.clamp_max(beta - 1)
