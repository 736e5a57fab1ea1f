"""The state of a causal plan with memory of a fixed size: everything that it keeps of the tokens so far."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fewkeys.core.fields import Fields
from fewkeys.core.precision import working
from fewkeys.past.running import RunningQueries
from fewkeys.past.summary import Summary
from fewkeys.past.tokens import Stretch, Tokens


@dataclass(frozen=True, eq=False)
class State(Fields):
    """The state after `length` tokens. The current unit of positions began at `moved`.

    near: the latest tokens; sinks: the first ones; summary: the stand-ins of evicted keys, and queries: the moments of
    queries, both as of `moved`. unit_queries (B, Hkv, gqa_ratio, length - moved, D): the scaled queries of the current
    unit, zero for tokens without one; has_query (B, length - moved): whether a token has one.
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
        """No tokens, with places for `means` stand-ins, for keys (B, Hkv, N, D) and values (B, Hkv, N, Dv)."""
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

    def append(self, key: Tensor, value: Tensor, query: Tensor | None = None, *, sinks: int = 0) -> State:
        """The state with further tokens and their scaled queries (B, Hkv, gqa_ratio, N, D), or None.

        `sinks`: the number of first tokens that are never removed.
        """
        before, count = self.unit_queries, key.shape[2]
        has_query = self.has_query.new_full((key.shape[0], count), query is not None)
        if query is None:
            query = before.new_zeros((*before.shape[:3], count, before.shape[4]))
        elif before.shape[2] != query.shape[2]:  # there has been no query yet
            before = before[:, :, :1].expand(-1, -1, query.shape[2], -1, -1)
        return replace(
            self,
            near=self.near.followed_by(key, value),
            sinks=self._sinks_with(key, value, sinks),
            unit_queries=torch.cat([before, query], 3),
            has_query=torch.cat([self.has_query, has_query], 1),
        )

    def advance(self, evicted: Tokens, *, tilted: bool) -> State:
        """The state at the end of a unit: its queries enter the moments, and evicted keys enter the summary.

        Near tokens stay. `trim` removes those that no query will need.
        """
        queries, summary = self.queries.add(self.unit_queries, self.has_query), self.summary
        if evicted.count:
            key, value = (working(rows) * evicted.real.unsqueeze(-1) for rows in (evicted.key, evicted.value))
            summary = summary.absorb(key, value, evicted.real, queries.moments(), tilted=tilted)
        none, no_flags = self.unit_queries[:, :, :, :0], self.has_query[:, :0]
        state = replace(self, moved=self.length, summary=summary, queries=queries)
        return replace(state, unit_queries=none, has_query=no_flags)

    def trim(self, place: int) -> State:
        """The state without the near tokens before `place`."""
        return replace(self, near=self.near.between(place, self.length))

    def crop(self, length: int) -> State:
        """The state without the tokens from `length` on, all of the current unit: the summary has none of them."""
        since = length - self.moved
        return replace(
            self,
            near=self.near.between(0, length),
            sinks=self.sinks.between(0, length),
            unit_queries=self.unit_queries[:, :, :, :since],
            has_query=self.has_query[:, :since],
        )

    def _sinks_with(self, key: Tensor, value: Tensor, count: int) -> Stretch:
        """The first `count` tokens of the stream."""
        free = count - self.sinks.count
        return self.sinks.followed_by(key[:, :, :free], value[:, :, :free]) if free > 0 else self.sinks
