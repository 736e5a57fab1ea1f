"""The state: everything that a causal plan holds of the tokens so far."""

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
    """What is held after `length` tokens, as the queries of the unit of positions that began at `moved` see it.

    near: the latest tokens, up to the last one; sinks: the first ones; summary: the stand-ins of keys that were
    evicted; queries: moments of the queries before `moved`. asked (B, Hkv, gqa_ratio, length - moved, D): the scaled
    queries since, zero where none came; answered (B, length - moved): where one came. A stream and a cache hold the
    same.
    """

    moved: int
    near: Stretch
    sinks: Stretch
    summary: Summary
    queries: RunningQueries
    asked: Tensor
    answered: Tensor

    @staticmethod
    def empty(means: int, key: Tensor, value: Tensor) -> State:
        """Before the first token, with places for `means` stand-ins, in the shape of keys (B, Hkv, N, D) and values."""
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
        """With further tokens and their scaled queries (B, Hkv, gqa_ratio, N, D).

        Without `query`, nobody asks. `sinks`: how many of the first tokens are held for ever.
        """
        asked, count = self.asked, key.shape[2]
        answered = self.answered.new_full((key.shape[0], count), query is not None)
        if query is None:
            query = asked.new_zeros((*asked.shape[:3], count, asked.shape[4]))
        elif asked.shape[2] != query.shape[2]:  # until now nobody has asked
            asked = asked[:, :, :1].expand(-1, -1, query.shape[2], -1, -1)
        return replace(
            self,
            near=self.near.followed_by(key, value),
            sinks=self._sunk(key, value, sinks),
            asked=torch.cat([asked, query], 3),
            answered=torch.cat([self.answered, answered], 1),
        )

    def advance(self, evicted: Tokens, *, tilted: bool) -> State:
        """The state when the unit is complete: its queries are known, its evicted keys absorbed.

        Near tokens stay: `trim` forgets those that no query will reach.
        """
        queries, summary = self.queries.add(self.asked, self.answered), self.summary
        if evicted.count:
            key, value = (working(rows) * evicted.real.unsqueeze(-1) for rows in (evicted.key, evicted.value))
            summary = summary.absorb(key, value, evicted.real, queries.moments(), tilted=tilted)
        asked, answered = self.asked[:, :, :, :0], self.answered[:, :0]
        return replace(self, moved=self.length, summary=summary, queries=queries, asked=asked, answered=answered)

    def trim(self, place: int) -> State:
        """Without the near tokens before `place`."""
        return replace(self, near=self.near.between(place, self.length))

    def crop(self, length: int) -> State:
        """Without what came from `length` on, which is at least `moved`: nothing but these lists knows of it."""
        since = length - self.moved
        return replace(
            self,
            near=self.near.between(0, length),
            sinks=self.sinks.between(0, length),
            asked=self.asked[:, :, :, :since],
            answered=self.answered[:, :since],
        )

    def _sunk(self, key: Tensor, value: Tensor, count: int) -> Stretch:
        """The first `count` tokens ever."""
        free = count - self.sinks.count
        return self.sinks.followed_by(key[:, :, :free], value[:, :, :free]) if free > 0 else self.sinks
