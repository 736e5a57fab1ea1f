"""Heavy keys of a stream: the best so far by a causal rule."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fewkeys.core.precision import working
from fewkeys.past.state import tensors_of, with_tensors
from fewkeys.past.tokens import Tokens
from fewkeys.select.causal import OnlineScore


@dataclass(eq=False)
class HeavyKeys:
    """At most `count` tokens kept by `score`, and the number that the score remembers with each, (B, Hkv, K)."""

    count: int
    score: OnlineScore
    rows: Tokens
    number: Tensor

    @staticmethod
    def empty(count: int, score: OnlineScore, key: Tensor, value: Tensor) -> HeavyKeys:
        """None yet, in the shape of keys (B, Hkv, N, D) and values."""
        rows = Tokens.empty(key, value)
        return HeavyKeys(count, score, rows, rows.place.to(working(key).dtype))

    def offer(self, new: Tokens) -> None:
        """Let a complete block of keys compete with those kept so far; all heads agree on which are real."""
        real = new.real[:, 0]
        number = self.score.offer(working(new.key), None if bool(real.all()) else real)
        self._compete(self.rows + new, torch.cat([self.number, number], -1))

    def join(self, rows: Tokens, other: HeavyKeys) -> None:
        """Let those kept by another stream's rule of the same kind compete, at the places that they have in `rows`."""
        self.score.add(other.score.sums)
        self._compete(self.rows + rows, torch.cat([self.number, other.number], -1))

    def tensors(self, root: str) -> dict[str, Tensor]:
        """Everything remembered, by name."""
        return tensors_of(self, root) | {f"{root}sums.{name}": part for name, part in self.score.sums.items()}

    def with_tensors(self, tensors: Mapping[str, Tensor], root: str) -> HeavyKeys:
        """Heavy keys that remember the tensors of these names in place of their own."""
        score, sums = copy.copy(self.score), f"{root}sums."
        score.sums = {name.removeprefix(sums): part for name, part in tensors.items() if name.startswith(sums)}
        return replace(with_tensors(self, tensors, root), score=score)

    def _compete(self, rows: Tokens, number: Tensor) -> None:
        if rows.count > self.count:
            score = self.score.score(working(rows.key), number).masked_fill(~rows.real, -torch.inf)
            best = score.topk(self.count, -1).indices.sort(-1).values
            rows, number = rows.take(best), number.gather(-1, best)
        self.rows, self.number = rows, number
