"""Everything that a stream remembers, and how it moves when a unit of positions is complete."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import pad

from fewkeys.core.precision import working
from fewkeys.core.weights import Softmax, positive
from fewkeys.past.running import RunningKeys, RunningQueries
from fewkeys.past.scan import Leaving, Past, Walk
from fewkeys.past.summary import Summary
from fewkeys.plan import Plan
from fewkeys.select.causal import CAUSAL_BLOCK
from fewkeys.streaming.heavy import HeavyKeys
from fewkeys.streaming.parts import Parts
from fewkeys.streaming.rows import Rows


class Memory:
    """What is left of the first `length` tokens.

    near: the keys that recent blocks, the window and the next choice of heavy keys reach; sinks: the first real keys;
    heavy: one list per rule; summary: means of all others. queries: moments of the queries before the current unit;
    asked (B, Hkv, groups, M, D): the scaled queries of the unit so far, zero where none came; answered (B, M): where
    one came.
    """

    def __init__(self, plan: Plan, parts: Parts, key: Tensor, value: Tensor, generator: torch.Generator | None) -> None:
        self.plan, self.parts = plan, parts
        self.length = self.moved = 0
        self.near = self.sinks = Rows.empty(key, value)
        self.heavy = [HeavyKeys.empty(part.count, part.online(generator), key, value) for part in parts.heavy]
        self.summary = Summary.empty(parts.means, working(key), working(value))
        self.queries = RunningQueries.empty(working(key))
        self.asked = working(key).new_zeros((*key.shape[:2], 1, 0, key.shape[-1]))
        self.answered = torch.zeros((key.shape[0], 0), dtype=torch.bool, device=key.device)

    @property
    def tilted(self) -> bool:
        return isinstance(self.plan.weights, Softmax)

    def append(self, key: Tensor, value: Tensor, real: Tensor) -> None:
        """Add tokens that do not reach beyond the current unit; `real` (B, N)."""
        self.move()
        new = Rows.at(self.length, key, value, real)
        self.near = self.near + new
        self._sink(new)
        self.length += key.shape[2]
        self.asked = pad(self.asked, (0, 0, 0, key.shape[2]))
        self.answered = pad(self.answered, (0, key.shape[2]))

    def attend(self, query: Tensor, real: Tensor, scale: float) -> Tensor:
        """Outputs (B, Hq, M, Dv) of the queries (B, Hq, M, D) of the last M tokens, of which `real` (B, M) count."""
        rows = working(query).unflatten(1, (self.near.key.shape[1], -1)) * scale
        self._note(rows, real)
        places = torch.arange(self.length - query.shape[2], self.length, device=query.device)
        seen = self._seen(places)
        scores = [_scores(rows, self.near, seen)]
        values = [self.near.value]
        held = [rows for rows in (self.sinks, *(heavy.rows for heavy in self.heavy)) if rows.count]
        for number, part in enumerate(held):
            for other in held[:number]:
                part = part.but(other)
            shown = part.real.unsqueeze(2) & (part.place.unsqueeze(2) <= places[:, None])
            scores.append(_scores(rows, part, shown & ~self._among_near(part, seen)))
            values.append(part.value)
        if self.parts.means:
            bias = self.summary.excess if self.tilted else self.summary.size.log().clamp_max(0.0)
            scores.append(rows @ self.summary.key.mT.unsqueeze(2) + bias[:, :, None, None])
            values.append(self.summary.value)
        found = self.plan.weights.kernel(scores)
        if self.parts.means and not self.tilted:
            found[-1] = found[-1] * self.summary.size[:, :, None, None]
        mixed = torch.cat(found, -1) @ working(torch.cat([working(value) for value in values], 2)).unsqueeze(2)
        output = mixed / positive(torch.cat(found, -1).sum(-1, keepdim=True))
        return output.flatten(1, 2).to(query.dtype)

    def move(self) -> None:
        """Let everything take its place for the unit that begins at `length`, if one does and nothing has moved yet."""
        start, parts = self.length, self.parts
        if start == self.moved or start % parts.unit:
            return
        before = [heavy.rows for heavy in self.heavy]
        if self.heavy and start % CAUSAL_BLOCK == 0:
            complete = self._near_between(start - CAUSAL_BLOCK, start)
            for heavy in self.heavy:
                heavy.offer(complete)
        if parts.means:
            leaving = self._near_between(parts.near_from(start - 1), parts.near_from(start))
            rows = self._let_go([leaving, *before], parts.near_from(start))
            keys = Leaving.all(rows.key, rows.value, rows.real)
            past, asked = Past(self.summary, self.queries), self.asked.flatten(1, 2)
            _, past = Walk(past, asked, self.answered, 1.0, keys, self.tilted).run()
            self.summary, self.queries = past.summary, past.queries
        self.asked, self.answered = self.asked[:, :, :, :0], self.answered[:, :0]
        self._trim(start)
        self.moved = start

    def crop(self, length: int) -> None:
        """Forget what came from `length` on, which is not before the current unit."""
        gone = self.length - length
        self.near = self.near[: self.near.count - gone]
        self.sinks = self.sinks[: int((self.sinks.place < length).sum(-1).max())] if self.sinks.count else self.sinks
        self.sinks = Rows(
            self.sinks.key, self.sinks.value, self.sinks.place, self.sinks.real & (self.sinks.place < length)
        )
        self.asked = self.asked[:, :, :, : self.asked.shape[3] - gone]
        self.answered = self.answered[:, : self.answered.shape[1] - gone]
        self.length = length

    def merge(self, other: Memory) -> None:
        """Take over the memory of tokens that came after these; `length` is a multiple of `parts.aligned`."""
        self.move()
        start, parts = self.length, self.parts
        end = start + other.length
        near_from, until = parts.near_from(start), parts.near_from(end - 1)
        their_sinks, their_near = (_shifted(rows, start) for rows in (other.sinks, other.near))
        before = [heavy.rows for heavy in self.heavy]
        for heavy, theirs in zip(self.heavy, other.heavy, strict=True):
            moved = HeavyKeys(theirs.count, theirs.score, _shifted(theirs.rows, start), theirs.number)
            before.append(moved.rows)
            heavy.join(moved)
        leaving = self._near_between(near_from, until)
        self.near, self.length = self.near + their_near, end
        self._sink(their_sinks)
        self.queries = self.queries + other.queries
        if parts.means:
            self.summary = self.summary.merged(other.summary, self.queries.moments(), tilted=self.tilted)
            rows = self._let_go([leaving, *before, their_sinks], until)
            if rows.count:
                key, value = (working(t) * rows.real.unsqueeze(-1) for t in (rows.key, rows.value))
                self.summary = self.summary.absorb(key, value, rows.real, self.queries.moments(), tilted=self.tilted)
        self.asked, self.answered = other.asked, other.answered
        self.moved = start + other.moved
        self._trim(end - 1)

    def each(self, change: Callable[[Tensor], Tensor]) -> Memory:
        """A memory of the same form whose tensors, all with the batch first, are changed alike."""
        found = copy.copy(self)
        found.restore({name: change(tensor) for name, tensor in self.tensors().items()})
        return found

    def tensors(self) -> dict[str, Tensor]:
        """Everything remembered, by name."""
        named: dict[str, object] = {"near": self.near, "sinks": self.sinks, "summary": self.summary}
        named |= {"queries": self.queries, "asked": self.asked, "answered": self.answered}
        for number, heavy in enumerate(self.heavy):
            named |= {f"heavy{number}.rows": heavy.rows, f"heavy{number}.number": heavy.number}
            named |= {f"heavy{number}.sums.{name}": part for name, part in heavy.score.sums.items()}
        return {name: tensor for root, part in named.items() for name, tensor in _leaves(root, part)}

    def restore(self, tensors: dict[str, Tensor]) -> None:
        """Remember what `tensors()` gave, in place of everything."""

        def part(root: str) -> dict[str, Tensor]:
            found = {
                name.removeprefix(f"{root}."): part for name, part in tensors.items() if name.startswith(f"{root}.")
            }
            return {name: part for name, part in found.items() if "." not in name}

        self.near, self.sinks = Rows(**part("near")), Rows(**part("sinks"))
        self.summary = Summary(**part("summary"), seen=RunningKeys(**part("summary.seen")))
        self.queries = RunningQueries(**part("queries"))
        self.asked, self.answered = tensors["asked"], tensors["answered"]
        found = []
        for number, heavy in enumerate(self.heavy):
            score, root = copy.copy(heavy.score), f"heavy{number}"
            score.sums = part(f"{root}.sums")
            found.append(HeavyKeys(heavy.count, score, Rows(**part(f"{root}.rows")), tensors[f"{root}.number"]))
        self.heavy = found

    def size(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors().values())

    def _sink(self, new: Rows) -> None:
        """The first real rows ever, in order."""
        if self.parts.sinks and (self.sinks.count < self.parts.sinks or not bool(self.sinks.real.all())):
            rows = self.sinks + new
            self.sinks = rows.take((~rows.real).to(torch.int8).argsort(dim=-1, stable=True)[..., : self.parts.sinks])

    def _let_go(self, leaving: list[Rows], near_from: int) -> Rows:
        """Those rows that are held nowhere any more, each once; the others are no longer real."""
        kept = [self.sinks, *(heavy.rows for heavy in self.heavy)]
        free = [rows.within(0, near_from) for rows in leaving]
        found: list[Rows] = []
        for rows in free:
            for other in (*kept, *found):
                rows = rows.but(other)
            found.append(rows)
        return sum(found[1:], found[0])

    def _trim(self, position: int) -> None:
        first = self.length - self.near.count
        self.near = self.near[max(0, self.parts.needed_from(position) - first) :]

    def _near_between(self, start: int, stop: int) -> Rows:
        first = self.length - self.near.count
        return self.near[max(0, start - first) : max(0, stop - first)]

    def _seen(self, places: Tensor) -> Tensor:
        """(B, Hkv, M, near): which near keys the queries at `places` (M,) see as near ones."""
        near, parts = self.near, self.parts
        mine, place = places[:, None], near.place.unsqueeze(2)
        seen = (place >= parts.near_from(int(places[0]))) | (place > mine - parts.window)
        block = self.length - 1 - (self.length - 1) % CAUSAL_BLOCK
        for heavy in self.heavy:
            # While a list has free places, they go to the first real keys of the current block.
            free = heavy.count - heavy.rows.count
            if free > 0:
                own = near.real & (near.place >= block)
                seen = seen | (own & (own.cumsum(-1) <= free)).unsqueeze(2)
        return seen & (place <= mine) & near.real.unsqueeze(2)

    def _among_near(self, part: Rows, seen: Tensor) -> Tensor:
        """(B, Hkv, M, K): which of the rows a query sees among the near keys already."""
        index = part.place - (self.length - self.near.count)
        inside = ((index >= 0) & (index < self.near.count)).unsqueeze(2)
        index = index.clamp(0, self.near.count - 1).unsqueeze(2).expand(-1, -1, seen.shape[2], -1)
        return inside & seen.gather(-1, index)

    def _note(self, rows: Tensor, real: Tensor) -> None:
        """Remember the queries of the current unit."""
        count = rows.shape[3]
        if self.asked.shape[2] != rows.shape[2]:
            self.asked = self.asked[:, :, :1].expand(-1, -1, rows.shape[2], -1, -1)
        self.asked = torch.cat([self.asked[:, :, :, : self.asked.shape[3] - count], rows], 3)
        self.answered = torch.cat([self.answered[:, : self.answered.shape[1] - count], real], 1)


def _scores(rows: Tensor, keys: Rows, seen: Tensor) -> Tensor:
    return (rows @ working(keys.key).mT.unsqueeze(2)).masked_fill(~seen.unsqueeze(2), -math.inf)


def _shifted(rows: Rows, by: int) -> Rows:
    return Rows(rows.key, rows.value, rows.place + by, rows.real)


def _leaves(root: str, part: object) -> list[tuple[str, Tensor]]:
    if isinstance(part, Tensor):
        return [(root, part)]
    return [leaf for name, inner in vars(part).items() for leaf in _leaves(f"{root}.{name}", inner)]
