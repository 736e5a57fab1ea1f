"""The state: everything that a causal plan holds of the tokens so far."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, is_dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from fewkeys.core.precision import working
from fewkeys.past.running import RunningQueries
from fewkeys.past.summary import Summary
from fewkeys.past.tokens import Tokens

T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class State:
    """What is held after `length` tokens, as the queries of the unit of positions that began at `moved` see it.

    near: the latest tokens, up to the last one, in order; sinks: the first real ones; summary: the stand-ins of keys
    that were evicted; queries: moments of the queries before `moved`. asked (B, Hkv, gqa_ratio, length - moved, D): the
    scaled queries since, zero where none came; answered (B, length - moved): where one came. A stream, a cache and a
    shard hold the same; only a stream holds more, if its plan keeps heavy keys.
    """

    length: int
    moved: int
    near: Tokens
    sinks: Tokens
    summary: Summary
    queries: RunningQueries
    asked: Tensor
    answered: Tensor

    @staticmethod
    def empty(means: int, key: Tensor, value: Tensor, *, gqa_ratio: int = 1) -> State:
        """Before the first token, with places for `means` stand-ins, in the shape of keys (B, Hkv, N, D) and values."""
        none, rows = Tokens.empty(key, value), (working(key[:, :, :0]), working(value[:, :, :0]))
        return State(
            0,
            0,
            none,
            none,
            Summary.empty(means, *rows),
            RunningQueries.empty(rows[0]),
            rows[0].new_zeros((*key.shape[:2], gqa_ratio, 0, key.shape[-1])),
            torch.zeros((key.shape[0], 0), dtype=torch.bool, device=key.device),
        )

    @property
    def first(self) -> int:
        """The place of the first near token."""
        return self.length - self.near.count

    def append(self, tokens: Tokens, query: Tensor | None = None, *, sinks: int = 0) -> State:
        """With further tokens and their scaled queries (B, Hkv, gqa_ratio, N, D), of which the real ones' count.

        Without `query`, nobody asks. `sinks`: how many of the first real tokens are held for ever.
        """
        asked, real = self.asked, tokens.real[:, 0]
        if query is None:
            query, real = asked.new_zeros((*asked.shape[:3], tokens.count, asked.shape[4])), torch.zeros_like(real)
        elif asked.shape[2] != query.shape[2]:  # until now nobody has asked
            asked = asked[:, :, :1].expand(-1, -1, query.shape[2], -1, -1)
        return replace(
            self,
            length=self.length + tokens.count,
            near=self.near + tokens,
            sinks=self._sunk(tokens, sinks),
            asked=torch.cat([asked, query], 3),
            answered=torch.cat([self.answered, real], 1),
        )

    def between(self, places: range) -> Tokens:
        """The near tokens at these places, as far as they are still there."""
        return self.near[max(0, places.start - self.first) : max(0, places.stop - self.first)]

    def trim(self, place: int) -> State:
        """Without the near tokens before `place`."""
        return replace(self, near=self.near[max(0, place - self.first) :])

    def absorb(self, tokens: Tokens, *, tilted: bool) -> State:
        """With these evicted tokens in the summary."""
        if not tokens.count:
            return self
        key, value = (working(rows) * tokens.real.unsqueeze(-1) for rows in (tokens.key, tokens.value))
        moments = self.queries.moments()
        return replace(self, summary=self.summary.absorb(key, value, tokens.real, moments, tilted=tilted))

    def merge(self, other: State, *, sinks: int, tilted: bool) -> State:
        """As if the tokens of `other`, which began at place 0, had come after these; nobody is evicted yet.

        This one must stand between two units: `moved` is its `length`, and nobody is still to be asked.
        """
        by = self.length
        queries = self.queries + other.queries
        summary = self.summary
        if summary.count:
            summary = summary.merged(other.summary, queries.moments(), tilted=tilted)
        return State(
            by + other.length,
            by + other.moved,
            self.near + other.near.moved(by),
            self._sunk(other.sinks.moved(by), sinks),
            summary,
            queries,
            other.asked,
            other.answered,
        )

    def crop(self, length: int) -> State:
        """Without what came from `length` on, which is at least `moved`: nothing but these lists knows of it."""
        gone = self.length - length
        sinks = self.sinks.before(length)
        kept = int(sinks.real.sum(-1).max()) if sinks.count else 0
        return replace(
            self,
            length=length,
            near=self.near[: self.near.count - gone],
            sinks=sinks[:kept],
            asked=self.asked[:, :, :, : self.asked.shape[3] - gone],
            answered=self.answered[:, : self.answered.shape[1] - gone],
        )

    def _sunk(self, new: Tokens, count: int) -> Tokens:
        """The first `count` real tokens ever, in order."""
        if not count or (self.sinks.count >= count and bool(self.sinks.real.all())):
            return self.sinks
        return (self.sinks + new.earliest(count)).earliest(count)


def tensors_of(part: Any, root: str = "") -> dict[str, Tensor]:
    """The tensors of a dataclass, and of those in it, by their dotted names, in a fixed order."""
    found: dict[str, Tensor] = {}
    for name, inner in vars(part).items():
        if isinstance(inner, Tensor):
            found[root + name] = inner
        elif is_dataclass(inner):
            found |= tensors_of(inner, f"{root}{name}.")
    return found


def with_tensors(part: T, tensors: Mapping[str, Tensor], root: str = "") -> T:
    """The same with the tensors of these names; `KeyError` where one is missing."""
    found: dict[str, Any] = {}
    for name, inner in vars(part).items():
        if isinstance(inner, Tensor):
            found[name] = tensors[root + name]
        elif is_dataclass(inner):
            found[name] = with_tensors(inner, tensors, f"{root}{name}.")
    return replace(part, **found)  # type: ignore[type-var]
