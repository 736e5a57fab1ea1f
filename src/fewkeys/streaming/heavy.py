"""Heavy keys of a stream: the best so far by a causal rule."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fewkeys.core.precision import working
from fewkeys.select.causal import OnlineScore
from fewkeys.streaming.rows import Rows


@dataclass(eq=False)
class HeavyKeys:
    """At most `count` rows kept by `score`, and the number that the score remembers with each, (B, Hkv, K)."""

    count: int
    score: OnlineScore
    rows: Rows
    number: Tensor

    @staticmethod
    def empty(count: int, score: OnlineScore, key: Tensor, value: Tensor) -> HeavyKeys:
        """None yet, in the shape of keys (B, Hkv, N, D) and values."""
        rows = Rows.empty(key, value)
        return HeavyKeys(count, score, rows, rows.place.to(working(key).dtype))

    def offer(self, new: Rows) -> None:
        """Let a complete block of keys compete with those kept so far; all heads agree on which are real."""
        real = new.real[:, 0]
        number = self.score.offer(working(new.key), None if bool(real.all()) else real)
        self._compete(self.rows + new, torch.cat([self.number, number], -1))

    def join(self, other: HeavyKeys) -> None:
        """Let those kept by another stream's rule of the same kind compete."""
        self.score.add(other.score.sums)
        self._compete(self.rows + other.rows, torch.cat([self.number, other.number], -1))

    def _compete(self, rows: Rows, number: Tensor) -> None:
        if rows.count > self.count:
            score = self.score.score(working(rows.key), number).masked_fill(~rows.real, -torch.inf)
            best = score.topk(self.count, -1).indices.sort(-1).values
            rows, number = rows.take(best), number.gather(-1, best)
        self.rows, self.number = rows, number
