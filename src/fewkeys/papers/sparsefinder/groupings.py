"""Rules that join queries and keys of one space: by distance, by shared buckets, by shared clusters.

Every rule is a frozen value and takes queries (B, Hq, Nq, r) and keys (B, Hq, Nk, r) of the same space; `fitted` is
what was learned of the space before. Source: Sparsefinder (arXiv 2109.12188), section 3.3.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor
from torch.nn.functional import normalize

from fewkeys.core.catalogue import Catalogue, Listed
from fewkeys.core.graph import Graph, visible
from fewkeys.core.inputs import Inputs
from fewkeys.core.learned import Learned
from fewkeys.core.validation import check_count, check_real
from fewkeys.papers.sparsefinder.groups import Groups
from fewkeys.papers.sparsefinder.projection import Centroids, check_table
from fewkeys.select.rows import listed, query_blocks

Metric = Literal["l2", "cosine"]
Kind = Literal["equal_size", "uniform"]


@dataclass(frozen=True, eq=False, repr=False)
class Edges(Learned):
    """The edges between buckets for every query head and dimension: `query` and `key` (Hq, r, beta - 1), ascending."""

    query: Tensor
    key: Tensor

    def __post_init__(self) -> None:
        for name, edges in (("query", self.query), ("key", self.key)):
            check_table(f"Edges {name}", edges, "(query heads, r, beta - 1)", empty=True)
            if bool((edges.diff(dim=-1) < 0).any()):
                raise ValueError(f"Edges {name}: expected ascending edges, got descending ones; sort them")
        if self.query.shape != self.key.shape:
            raise ValueError(f"Edges key: expected {tuple(self.query.shape)} like query, got {tuple(self.key.shape)}")


@dataclass(frozen=True, eq=False, repr=False)
class Joined(Learned):
    """Clusters of queries and clusters of keys of every head, and which of them are joined.

    `query` and `key` (Hq, C, r): the centroids. `pairs` bool (Hq, C, C): whether cluster a of the queries is joined to
    cluster b of the keys.
    """

    query: Tensor
    key: Tensor
    pairs: Tensor

    def __post_init__(self) -> None:
        check_table("Joined query", self.query, "(query heads, clusters, r)")
        check_table("Joined key", self.key, "(query heads, clusters, r)")
        heads, clusters, _ = self.query.shape
        if self.key.shape != self.query.shape:
            raise ValueError(f"Joined key: expected {tuple(self.query.shape)} like query, got {tuple(self.key.shape)}")
        if not isinstance(self.pairs, Tensor) or self.pairs.dtype != torch.bool:
            raise TypeError("Joined pairs: expected a bool tensor (query heads, clusters, clusters), got another")
        if self.pairs.shape != (heads, clusters, clusters):
            raise ValueError(f"Joined pairs: expected {(heads, clusters, clusters)}, got {tuple(self.pairs.shape)}")


Fitted = Centroids | Edges | Joined | None


class Grouping(Listed, ABC):
    """A rule that joins queries and keys of one space."""

    @abstractmethod
    def graph(self, inputs: Inputs, query: Tensor, key: Tensor, fitted: Fitted) -> Graph:
        """The edges between projected queries (B, Hq, Nq, r) and keys (B, Hq, Nk, r)."""

    @abstractmethod
    def work(self, inputs: Inputs, rank: int, fitted: Fitted) -> tuple[float, float]:
        """The expected number of keys per query, and operations per key and query head of choosing them."""

    @property
    def joins_all(self) -> bool:
        """Whether every query is joined to every key for all data."""
        return False

    @property
    def is_oracle(self) -> bool:
        """Whether the rule compares every query with every key."""
        return False

    @property
    def learns(self) -> tuple[type, ...]:
        """The allowed classes of `fitted`."""
        return (type(None),)

    def expected_size(self, fitted: Fitted) -> str | None:
        """The expected size, in words, if `fitted` has another one; else None."""
        return None

    def causal(self, fitted: Fitted) -> bool:
        """Whether a query's keys do not depend on later tokens."""
        return True


@dataclass(frozen=True)
class Distance(Grouping):
    """(i, j) is an edge when `|q'_i - k'_j| <= t` (l2), or `1 - cos(q'_i, k'_j) <= t` (cosine).

    Compares every pair, in r dimensions instead of D: O(n^2 r), and the graph has a list per query. A bound on the
    quality of the space; it saves no time.
    """

    t: float
    metric: Metric = "l2"

    def __post_init__(self) -> None:
        check_real("Distance t", self.t, above=0.0)
        if self.metric not in get_args(Metric):
            raise ValueError(f"Distance metric: expected 'l2' or 'cosine', got {self.metric!r}")

    def graph(self, inputs: Inputs, query: Tensor, key: Tensor, fitted: Fitted) -> Graph:
        return listed(inputs, self._masks(inputs, query, key))

    def _masks(self, inputs: Inputs, query: Tensor, key: Tensor) -> Iterator[Tensor]:
        if self.metric == "cosine":
            query, key = normalize(query, dim=-1), normalize(key, dim=-1)
        size = key.square().sum(-1).unsqueeze(-2)
        for start, stop in query_blocks(inputs):
            rows = query[:, :, start:stop]
            if self.metric == "cosine":
                near = rows @ key.mT >= 1 - self.t
            else:
                near = rows.square().sum(-1, keepdim=True) + size - 2 * (rows @ key.mT) <= self.t**2
            yield near & visible(inputs, start, stop)

    def work(self, inputs: Inputs, rank: int, fitted: Fitted) -> tuple[float, float]:
        return float(inputs.keys), 2.0 * rank * inputs.queries

    @property
    def is_oracle(self) -> bool:
        return True


@dataclass(frozen=True)
class Buckets(Grouping):
    """(i, j) is an edge when q'_i and k'_j share one of `beta` buckets in *any* of the r dimensions.

    kind "equal_size": in every dimension the n queries of a sequence, sorted, fill buckets of `ceil(n / beta)`, and so
    do the keys; bucket b of queries is joined to bucket b of keys. Ranks depend on the whole sequence, so causal and
    cross-attention use fitted quantiles instead (`Edges`). kind "uniform": `floor(beta (tanh(x) + 1) / 2)`, which
    depends on no other token.

    Cost O(n r log n) to choose; a share of up to `1 - (1 - 1 / beta)^r` of the pairs are edges.
    """

    beta: int
    kind: Kind = "equal_size"

    def __post_init__(self) -> None:
        check_count("Buckets beta", self.beta)
        if self.kind not in get_args(Kind):
            raise ValueError(f"Buckets kind: expected 'equal_size' or 'uniform', got {self.kind!r}")

    def graph(self, inputs: Inputs, query: Tensor, key: Tensor, fitted: Fitted) -> Graph:
        x = inputs
        if self.kind == "uniform":
            bins = [((rows.tanh() + 1) * (self.beta / 2)).long().clamp_max(self.beta - 1) for rows in (query, key)]
        elif isinstance(fitted, Edges):
            bins = [_between(rows, edges) for rows, edges in ((query, fitted.query), (key, fitted.key))]
        else:
            bins = [_by_rank(rows, real, self.beta) for rows, real in ((query, x.valid_queries), (key, x.valid))]
        first = torch.arange(query.shape[-1], device=query.device) * self.beta
        ids = [_real(bin_ + first, real) for bin_, real in zip(bins, (x.valid_queries, x.valid), strict=True)]
        return Graph(x, extra=Groups(ids[0], ids[1], query.shape[-1] * self.beta))

    @property
    def joins_all(self) -> bool:
        return self.beta == 1

    @property
    def learns(self) -> tuple[type, ...]:
        return (Edges, type(None)) if self.kind == "equal_size" else (type(None),)

    def expected_size(self, fitted: Fitted) -> str | None:
        wrong = isinstance(fitted, Edges) and fitted.query.shape[2] != self.beta - 1
        return f"edges (query heads, r, {self.beta - 1})" if wrong else None

    def causal(self, fitted: Fitted) -> bool:
        return self.kind != "equal_size" or fitted is not None

    def work(self, inputs: Inputs, rank: int, fitted: Fitted) -> tuple[float, float]:
        density = 1 - (1 - 1 / self.beta) ** rank
        return inputs.keys * density, 20.0 * rank


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

    def __post_init__(self) -> None:
        check_count("Clusters count", self.count)
        check_count("Clusters top", self.top)
        check_count("Clusters rounds", self.rounds)
        if self.top > self.count:
            raise ValueError(f"Clusters top: expected at most the count, {self.count}, got {self.top}")

    def graph(self, inputs: Inputs, query: Tensor, key: Tensor, fitted: Fitted) -> Graph:
        if not isinstance(fitted, Centroids):
            raise ValueError("fitted: expected the Centroids of Clusters, got none; use Sparsefinder.selector")
        place = fitted.for_rows(query)
        reals = (inputs.valid_queries, inputs.valid)
        ids = [_real(self._nearest(rows, place), real) for rows, real in zip((query, key), reals, strict=True)]
        return Graph(inputs, extra=Groups(ids[0], ids[1], self.count * self.rounds))

    def _nearest(self, rows: Tensor, place: Tensor) -> Tensor:
        """Ids (B, H, N, rounds top)."""
        ids = []
        for number, centroids in enumerate(place.split(self.count, 1)):
            closeness = rows @ centroids.mT - 0.5 * centroids.square().sum(-1).unsqueeze(-2)
            ids.append(closeness.topk(self.top, -1).indices + number * self.count)
        return torch.cat(ids, -1)

    @property
    def joins_all(self) -> bool:
        return self.top == self.count

    @property
    def learns(self) -> tuple[type, ...]:
        return (Centroids,)

    def expected_size(self, fitted: Fitted) -> str | None:
        wrong = isinstance(fitted, Centroids) and fitted.count != self.count * self.rounds
        return f"count x rounds centroids for {self}" if wrong else None

    def work(self, inputs: Inputs, rank: int, fitted: Fitted) -> tuple[float, float]:
        density = min(1.0, self.rounds * self.top**2 / self.count)
        return inputs.keys * density, 4.0 * rank * self.count * self.rounds


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

    def __post_init__(self) -> None:
        check_count("ClusterPairs count", self.count)
        check_real("ClusterPairs lift", self.lift, above=0.0)

    def graph(self, inputs: Inputs, query: Tensor, key: Tensor, fitted: Fitted) -> Graph:
        if not isinstance(fitted, Joined):
            raise ValueError(
                "fitted: expected the Joined clusters of ClusterPairs, got none; use Sparsefinder.selector"
            )
        key_clusters = nearest(key, fitted.key.to(key))
        # A group is a cluster of keys. A query is in the groups that its cluster is joined to.
        pairs = fitted.pairs.to(query.device)
        lists = torch.where(pairs, torch.arange(self.count, device=query.device), -1)
        lists = lists.topk(int(pairs.sum(-1).max()), -1).values.expand(len(query), -1, -1, -1)
        clusters = nearest(query, fitted.query.to(query))
        ids = lists.gather(2, clusters.unsqueeze(-1).expand(-1, -1, -1, lists.shape[-1]))
        groups = Groups(_real(ids, inputs.valid_queries), _real(key_clusters.unsqueeze(-1), inputs.valid), self.count)
        return Graph(inputs, extra=groups)

    @property
    def learns(self) -> tuple[type, ...]:
        return (Joined,)

    def expected_size(self, fitted: Fitted) -> str | None:
        wrong = isinstance(fitted, Joined) and fitted.query.shape[1] != self.count
        return f"{self.count} clusters of queries and of keys" if wrong else None

    def work(self, inputs: Inputs, rank: int, fitted: Fitted) -> tuple[float, float]:
        density = float(fitted.pairs.double().mean()) if isinstance(fitted, Joined) else 1.0
        return inputs.keys * density, 4.0 * rank * self.count


GROUPINGS: Catalogue[Grouping] = Catalogue(Grouping)


def nearest(rows: Tensor, centroids: Tensor) -> Tensor:
    """The nearest of centroids (H, C, r) to each of rows (B, H, N, r): (B, H, N)."""
    return (rows @ centroids.mT - 0.5 * centroids.square().sum(-1).unsqueeze(-2)).argmax(-1)


def _real(ids: Tensor, real: Tensor | None) -> Tensor:
    """Padded tokens are in no group."""
    return ids if real is None else ids.masked_fill(~real[:, None, :, None], -1)


def _between(rows: Tensor, edges: Tensor) -> Tensor:
    """The bucket of each entry of rows (B, H, N, r): how many of the edges (H, r, beta - 1) lie below it."""
    values = rows.permute(1, 3, 0, 2)
    buckets = torch.searchsorted(edges.to(rows), values.flatten(2).contiguous())
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
