"""Heavy keys of a stream: the best so far by a causal rule."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fewkeys.core.fields import Fields
from fewkeys.core.precision import working
from fewkeys.past.tokens import Stretch, Tokens
from fewkeys.select.base import Best
from fewkeys.select.causal import OnlineScore


@dataclass(frozen=True, eq=False)
class HeavyKeys(Fields):
    """At most `rule.count` tokens, the number (B, Hkv, K) that the score remembers with each, and its sums."""

    rule: Best
    generator: torch.Generator
    rows: Tokens
    number: Tensor
    sums: dict[str, Tensor]

    @staticmethod
    def empty(rule: Best, generator: torch.Generator, key: Tensor, value: Tensor) -> HeavyKeys:
        """None yet, in the shape of keys (B, Hkv, N, D) and values."""
        rows = Stretch.empty(key, value).tokens()
        return HeavyKeys(rule, generator, rows, rows.place.to(working(key).dtype), {})

    def offer(self, new: Stretch) -> HeavyKeys:
        """After a complete block of keys has competed with those kept so far."""
        score = self._score()
        number = score.offer(working(new.key), None)
        return self._best(self.rows + new.tokens(), number, score)

    def join(self, rows: Tokens, other: HeavyKeys) -> HeavyKeys:
        """After those kept by another stream's rule of the same kind, which stand at `rows` here, have competed."""
        score = self._score()
        score.add(other.sums)
        return self._best(self.rows + rows, other.number, score)

    def _score(self) -> OnlineScore:
        score = self.rule.online(self.generator)
        score.sums = self.sums
        return score

    def _best(self, rows: Tokens, number: Tensor, score: OnlineScore) -> HeavyKeys:
        number = torch.cat([self.number, number], -1)
        if rows.count > self.rule.count:
            scores = score.score(working(rows.key), number).masked_fill(~rows.real, -torch.inf)
            best = scores.topk(self.rule.count, -1).indices.sort(-1).values
            rows, number = rows.take(best), number.gather(-1, best)
        return replace(self, rows=rows, number=number, sums=score.sums)
