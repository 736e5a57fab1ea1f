"""Edges by groups: a query attends to the keys of its own groups.

Clusters, buckets and hash codes give every query and every key a few ids; a query and a key that share an id are an
edge. Several rounds, or several quantised dimensions, have distinct ids in one flat numbering: round r of C clusters
has ids r C .. (r + 1) C - 1.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import pad

from fewkeys.core.inputs import Inputs
from fewkeys.core.validation import check_count
from fewkeys.execute.problem import Problem
from fewkeys.execute.torch.by_block import block_size, by_chunks, row_entries
from fewkeys.execute.torch.sources import Chunk
from fewkeys.papers.sparsefinder.grouped import CHUNK_SCORES, GroupedKeys, attend_chunk, mean_width


@dataclass(frozen=True, eq=False)
class Groups:
    """Query i and key j are an edge when they share a group; sharing several counts once.

    `query` (B, Hq, Nq, Mq) and `key` (B, Hq, Nk, Mk), int64: the groups, 0 .. count - 1, of every query and of every
    key, -1 for none. Keys have groups for every *query* head, also where query heads share the keys themselves.
    """

    query: Tensor
    key: Tensor
    count: int

    def __post_init__(self) -> None:
        check_count("Groups count", self.count)
        for name, ids in (("query", self.query), ("key", self.key)):
            if not isinstance(ids, Tensor) or ids.dtype != torch.int64:
                got = ids.dtype if isinstance(ids, Tensor) else type(ids).__name__
                raise TypeError(f"Groups {name}: expected int64 ids, got {got}; convert them with .long()")
            if ids.ndim != 4:
                raise ValueError(
                    f"Groups {name}: expected shape (batch, query heads, tokens, memberships), got {tuple(ids.shape)}; "
                    "add the missing dimensions with unsqueeze"
                )
            low, high = (int(ids.min()), int(ids.max())) if ids.numel() else (-1, -1)
            if low < -1 or high >= self.count:
                raise ValueError(
                    f"Groups {name}: expected ids in 0 .. {self.count - 1}, or -1 for none, got {low} .. {high}; "
                    "raise count or clamp the ids"
                )
        if self.query.shape[:2] != self.key.shape[:2]:
            raise ValueError(
                f"Groups key: expected the batch and query heads of the queries, {tuple(self.query.shape[:2])}, got "
                f"{tuple(self.key.shape[:2])}; repeat the groups of shared keys for every query head"
            )

    def check(self, inputs: Inputs) -> None:
        """Raise `ValueError` where the ids are not those of such queries and keys."""
        x = inputs
        for name, ids, tokens in (("query", self.query, x.queries), ("key", self.key, x.keys)):
            if ids.shape[:3] != (x.batch, x.query_heads, tokens):
                raise ValueError(
                    f"groups: expected {name} ids of shape ({x.batch}, {x.query_heads}, {tokens}, any), got "
                    f"{tuple(ids.shape)}; ids are per batch entry, query head and token"
                )

    def __or__(self, other: Groups) -> Groups:
        """Edges of either: the ids of `other` are shifted behind those of this one."""

        def shifted(ids: Tensor) -> Tensor:
            return torch.where(ids < 0, ids, ids + self.count)

        query = torch.cat([self.query, shifted(other.query)], -1)
        return Groups(query, torch.cat([self.key, shifted(other.key)], -1), self.count + other.count)

    def mask(self, start: int, stop: int) -> Tensor:
        """Whether queries start .. stop - 1 share a group with each key: bool (B, Hq, stop - start, Nk)."""
        query, key = self.query[:, :, start:stop], self.key
        shared = torch.zeros((*query.shape[:3], key.shape[2]), dtype=torch.bool, device=key.device)
        for query_ids in query.masked_fill(query < 0, -2).unbind(-1):
            for key_ids in key.unbind(-1):
                shared |= query_ids.unsqueeze(-1) == key_ids.unsqueeze(-2)
        return shared

    def delayed(self, count: int) -> Groups:
        """The same groups with `count` queries of no group before the others."""
        return replace(self, query=pad(self.query, (0, 0, count, 0), value=-1))

    def attend(self, problem: Problem) -> Tensor:
        """The output (B, Hq, Nq, Dv), in time linear in the edges: `fewkeys.papers.sparsefinder.grouped`."""
        x, size = problem.inputs, block_size(problem.graph)
        sources, means = row_entries(problem, size)
        ids = self.query, self.key, self.count
        width = sum(source.width for source in sources) * x.gqa_ratio + mean_width(x, *ids)

        def of_heads(heads: slice) -> Callable[[Chunk], Tensor]:
            keys = GroupedKeys(x, *ids, heads)
            return partial(attend_chunk, keys=keys, sources=sources, means=means, weights=problem.weights)

        return by_chunks(problem, size, width, CHUNK_SCORES, of_heads)
