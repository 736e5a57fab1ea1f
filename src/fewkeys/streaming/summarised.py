"""Memory of a fixed size: what is near, sinks, heavy keys, and means of everything else.

    appended keys -> near (exact) -> sinks and heavy keys (exact) -> summary: means of everything else

What is kept depends on the plan alone, not on the length.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fewkeys.core.precision import working
from fewkeys.core.records import build
from fewkeys.core.weights import Softmax
from fewkeys.past.evicted import Evicted
from fewkeys.past.scan import advance
from fewkeys.past.state import State, tensors_of, with_tensors
from fewkeys.past.tokens import Tokens, unheld
from fewkeys.plan import Plan
from fewkeys.select.causal import CAUSAL_BLOCK
from fewkeys.streaming.attend import attend
from fewkeys.streaming.heavy import HeavyKeys
from fewkeys.streaming.parts import parts_of
from fewkeys.streaming.restored import check_rows, check_summarised


@dataclass(frozen=True)
class _Facts:
    """What `Summarised.facts` gives."""

    moved: int


@dataclass(frozen=True, eq=False)
class _Before:
    """What was held at some time: the state, heavy keys, and where the generator stood."""

    state: State
    heavy: list[HeavyKeys]
    draws: Tensor | None = None

    def tensors(self) -> dict[str, Tensor]:
        found = tensors_of(self.state)
        for number, heavy in enumerate(self.heavy):
            found |= heavy.tensors(f"heavy{number}.")
        return found

    def select(self, index: Tensor) -> _Before:
        """The same of these sequences."""
        own = {name: part[index] for name, part in tensors_of(self.state).items()}
        heavy = [
            one.with_tensors({name: part[index] for name, part in one.tensors("").items()}, "") for one in self.heavy
        ]
        return _Before(with_tensors(self.state, own), heavy, self.draws)


def copies(heavy: Sequence[HeavyKeys]) -> list[HeavyKeys]:
    """The same heavy keys, which go their own way."""
    return [one.with_tensors(one.tensors(""), "") for one in heavy]


class Summarised:
    """What a stream holds under a plan that forgets, beside its counters (`fewkeys.streaming.stream.Memory`)."""

    def __init__(self, plan: Plan, generator: torch.Generator, undo: int = 0) -> None:
        self.plan, self.parts, self.generator, self.undo = plan, parts_of(plan), generator, undo
        self._tilted = isinstance(plan.weights, Softmax)
        self._state: State | None = None
        self._heavy: list[HeavyKeys] = []
        """Beside the state: the keys that the plan's heavy rules keep, one list for each."""
        self._before: list[_Before] = []
        """What was held at the ends of the latest units, as far as the last `undo` tokens began in them."""

    def take(self, query: Tensor | None, key: Tensor, value: Tensor, real: Tensor, scale: float) -> Tensor:
        """The outputs of queries of new tokens, unit by unit."""
        state, done, outputs = self._state or self._begin(key, value), 0, []
        while done < key.shape[2]:
            state = self._moved(state)
            stop = min(key.shape[2], done + self.parts.unit - state.length % self.parts.unit)
            new = Tokens.at(state.length, key[:, :, done:stop], value[:, :, done:stop], real[:, done:stop])
            if query is None:
                state = state.append(new, sinks=self.parts.sinks)
            else:
                rows = working(query[:, :, done:stop]).unflatten(1, (key.shape[1], -1)) * scale
                state = state.append(new, rows, sinks=self.parts.sinks)
                outputs.append(attend(state, self._heavy, self.parts, self.plan.weights, rows).to(query.dtype))
            done = stop
        self._state = state
        return torch.cat(outputs, 2) if outputs else value[:, :, :0]

    def select(self, index: Tensor) -> None:
        now = self._now()
        self._before = [before.select(index) for before in self._before]
        if now is not None:
            self._go_back(now.select(index))

    def crop(self, length: int) -> None:
        if self._state is None:
            return
        known = [before for before in self._before if before.state.moved <= length <= before.state.length]
        if length < self._state.moved and not known:
            raise ValueError(
                f"length: expected at least {self._state.moved}: what came before is summarised by units of "
                f"{self.parts.unit} positions and cannot be undone; got {length}. Save the stream before tokens that "
                "may be taken back"
            )
        if length < self._state.moved:
            self._before = self._before[: self._before.index(known[-1])]
            self._go_back(known[-1])
        self._state = self._state.crop(length)

    def merge(self, other: Summarised) -> None:
        length = 0 if self._state is None else self._state.length
        if length % self.parts.aligned:
            raise ValueError(
                f"other: expected this stream to stand at a multiple of {self.parts.aligned} tokens, got {length}"
            )
        if other._state is None:
            return
        self._before = []
        if self._state is None:
            self._state, self._heavy = other._state, copies(other._heavy)
        else:
            self._state = self._merged(self._moved(self._state), other._state, other._heavy)

    def like(self) -> tuple[Tensor, ...]:
        return () if self._state is None else (self._state.near.key, self._state.near.value)

    def bytes(self) -> int:
        held = [*self.tensors().values(), *(part for before in self._before for part in before.tensors().values())]
        # What did not change between two units is held once.
        return sum({part.data_ptr(): part.numel() * part.element_size() for part in held}.values())

    def tensors(self) -> dict[str, Tensor]:
        now = self._now()
        return {} if now is None else now.tensors()

    def facts(self) -> dict[str, Any]:
        return {} if self._state is None else {"moved": self._state.moved}

    def restore(self, facts: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        length, rows = facts["length"], check_rows(tensors, "near.")
        moved = build(_Facts, {name: fact for name, fact in facts.items() if name != "length"}).moved
        before = self.generator.get_state()
        check_summarised(tensors, length, moved, self.parts, self._begin(*rows), self._heavy)
        self.generator.set_state(before)
        self._state, self._before = replace(self._begin(*rows), length=length, moved=moved), []
        self._remember(tensors)

    def _begin(self, key: Tensor, value: Tensor) -> State:
        """Nothing is held yet, in the shape of these keys and values."""
        parts = self.parts
        scores = [part.online(self.generator) for part in parts.heavy]
        counts = [part.count or 0 for part in parts.heavy]
        self._heavy = [HeavyKeys.empty(*of, key, value) for of in zip(counts, scores, strict=True)]
        return State.empty(parts.means, key, value)

    def _moved(self, state: State) -> State:
        """Everything takes its place for the unit that begins at `length`, if one does and nothing has moved yet."""
        parts, start = self.parts, state.length
        if start == state.moved or start % parts.unit:
            return state
        if self.undo:
            now = _Before(state, copies(self._heavy), self.generator.get_state() if self._heavy else None)
            self._before = [old for old in self._before if old.state.length > start - self.undo] + [now]
        released = [heavy.rows for heavy in self._heavy]
        if self._heavy and start % CAUSAL_BLOCK == 0:
            complete = state.between(range(start - CAUSAL_BLOCK, start))
            for heavy in self._heavy:
                heavy.offer(complete)
        evicted = self._evicted(state, parts.near_from(start - 1), parts.near_from(start), released)
        _, state = advance(state, Evicted.at_once(evicted), parts.unit, tilted=self._tilted)
        return state.trim(parts.needed_from(start))

    def _merged(self, state: State, other: State, heavy: Sequence[HeavyKeys]) -> State:
        """The state, which stands between two units, followed by another's."""
        parts, start = self.parts, state.length
        after = state.merge(other, sinks=parts.sinks, tilted=self._tilted)
        released = [other.sinks.moved(start)]
        for own, theirs in zip(self._heavy, heavy, strict=True):
            rows = theirs.rows.moved(start)
            released += [own.rows, rows]
            own.join(rows, theirs)
        held = replace(state, sinks=after.sinks)
        evicted = self._evicted(held, parts.near_from(start), parts.near_from(after.moved), released)
        return after.absorb(evicted, tilted=self._tilted).trim(parts.needed_from(after.moved))

    def _evicted(self, state: State, start: int, stop: int, released: list[Tokens]) -> Tokens:
        """What nobody holds any more of the near tokens from `start` on and the released ones, before `stop`.

        None where no means stand in for them.
        """
        if not self.parts.means:
            return state.near[:0]
        kept = [state.sinks, *(heavy.rows for heavy in self._heavy)]
        return unheld([state.between(range(start, stop)), *released], kept, stop)

    def _now(self) -> _Before | None:
        return None if self._state is None else _Before(self._state, self._heavy)

    def _go_back(self, to: _Before) -> None:
        self._state, self._heavy = to.state, copies(to.heavy)
        if to.draws is not None:
            self.generator.set_state(to.draws)

    def _remember(self, tensors: Mapping[str, Tensor]) -> None:
        """Hold the tensors of these names in place of the present ones; `KeyError` where one is missing."""
        if self._state is not None:
            self._state = with_tensors(self._state, tensors)
        self._heavy = [heavy.with_tensors(tensors, f"heavy{number}.") for number, heavy in enumerate(self._heavy)]
