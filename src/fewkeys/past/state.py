"""The past of a stream: near tokens, sinks, and the summary of the others."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fewkeys.core.fields import Fields
from fewkeys.core.precision import working
from fewkeys.past.running import RunningQueries
from fewkeys.past.summary import Summary


@dataclass(frozen=True, eq=False)
class Stretch(Fields):
    """`key` (B, Hkv, K, D) and `value` (B, Hkv, K, Dv) of the tokens at the places `first`, `first + 1`, ..."""

    first: int
    key: Tensor
    value: Tensor

    @staticmethod
    def empty(key: Tensor, value: Tensor) -> Stretch:
        # New tensors: a view would keep the memory of all tokens alive.
        return Stretch(0, *(rows.new_empty((*rows.shape[:2], 0, rows.shape[3])) for rows in (key, value)))

    @property
    def count(self) -> int:
        return self.key.shape[2]

    @property
    def stop(self) -> int:
        """The place after the last token."""
        return self.first + self.count

    def followed_by(self, key: Tensor, value: Tensor) -> Stretch:
        return Stretch(self.first, torch.cat([self.key, key], 2), torch.cat([self.value, value], 2))

    def between(self, start: int, stop: int) -> Stretch:
        """The tokens at places start .. stop - 1."""
        start = min(max(start, self.first), self.stop)
        part = slice(start - self.first, max(0, stop - self.first))
        return Stretch(start, self.key[:, :, part], self.value[:, :, part])


@dataclass(frozen=True, eq=False)
class State(Fields):
    """The state after `length` tokens. The current unit of positions began at `moved`.

    near: the latest tokens; sinks: the first ones; summary and queries: as of `moved`. Of the current unit:
    has_query (B, length - moved) marks tokens with queries, unit_queries (B, Hkv, gqa_ratio, length - moved, D) are
    these, scaled, else zero.
    """

    moved: int
    near: Stretch
    sinks: Stretch
    summary: Summary
    queries: RunningQueries
    unit_queries: Tensor
    has_query: Tensor

    @staticmethod
    def empty(means: int, key: Tensor, value: Tensor) -> State:
        """No tokens, and places for `means` stand-ins, for keys (B, Hkv, N, D) and values (B, Hkv, N, Dv)."""
        none, rows = Stretch.empty(key, value), (working(key[:, :, :0]), working(value[:, :, :0]))
        return State(
            0,
            none,
            none,
            Summary.empty(means, *rows),
            RunningQueries.empty(rows[0]),
            rows[0].new_zeros((*key.shape[:2], 1, 0, key.shape[-1])),
            torch.zeros((key.shape[0], 0), dtype=torch.bool, device=key.device),
        )

    @property
    def length(self) -> int:
        return self.near.stop

    def append(self, key: Tensor, value: Tensor, query: Tensor | None, sinks: int) -> State:
        """The state with more tokens and their scaled queries (B, Hkv, gqa_ratio, N, D), if any. sinks: how many first
        tokens stay.
        """
        before, count, free = self.unit_queries, key.shape[2], max(0, sinks - self.sinks.count)
        has_query = self.has_query.new_full((key.shape[0], count), query is not None)
        if query is None:
            query = before.new_zeros((*before.shape[:3], count, before.shape[4]))
        elif before.shape[2] != query.shape[2]:  # there has been no query yet
            before = before[:, :, :1].expand(-1, -1, query.shape[2], -1, -1)
        return replace(
            self,
            near=self.near.followed_by(key, value),
            sinks=self.sinks.followed_by(key[:, :, :free], value[:, :, :free]) if free else self.sinks,
            unit_queries=torch.cat([before, query], 3),
            has_query=torch.cat([self.has_query, has_query], 1),
        )

    def advance(self, start: int, stop: int, *, tilted: bool) -> State:
        """The state at the end of a unit: its queries enter the moments, and near tokens at places start .. stop - 1,
        except sinks, enter the summary.
        """
        queries, summary = self.queries.add(self.unit_queries, self.has_query), self.summary
        evicted = self.near.between(max(start, self.sinks.stop), stop)
        if evicted.count and summary.count:
            key, value = working(evicted.key), working(evicted.value)
            real = torch.ones(key.shape[:3], dtype=torch.bool, device=key.device)
            summary = summary.absorb(key, value, real, queries.moments(), tilted=tilted)
        return replace(
            self,
            moved=self.length,
            summary=summary,
            queries=queries,
            unit_queries=self.unit_queries[:, :, :, :0],
            has_query=self.has_query[:, :0],
        )

    def crop(self, length: int) -> State:
        """The state without the tokens from `length` on, which are of the current unit."""
        since = length - self.moved
        return replace(
            self,
            near=self.near.between(0, length),
            sinks=self.sinks.between(0, length),
            unit_queries=self.unit_queries[:, :, :, :since],
            has_query=self.has_query[:, :since],
        )
