"""Memory of a fixed size: what is near, sinks, heavy keys, and means of everything else.

    appended keys -> near (exact) -> sinks and heavy keys (exact) -> summary: means of everything else

What is kept depends on the plan alone, not on the length.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
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
    """What was held at the end of a unit: the state, heavy keys, and where the generator stood."""

    state: State
    heavy: list[HeavyKeys]
    draws: Tensor

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


class Summarised:
    """What sequences leave under a plan that forgets (`fewkeys.streaming.padded.Memory`)."""

    _state: State
    _heavy: list[HeavyKeys]
    """Beside the state: the keys that the plan's heavy rules keep, one list for each."""

    def __init__(self, plan: Plan, generator: torch.Generator, undo: int = 0) -> None:
        self.plan, self.parts, self.generator, self.undo = plan, parts_of(plan), generator, undo
        self._before: list[_Before] = []
        """What was held at the ends of the latest units, as far as the last `undo` tokens began in them."""
        self._tilted = isinstance(plan.weights, Softmax)

    def begin(self, key: Tensor, value: Tensor) -> Summarised:
        found, parts = Summarised(self.plan, self.generator, self.undo), self.parts
        scores = [part.online(self.generator) for part in parts.heavy]
        counts = [part.count or 0 for part in parts.heavy]
        found._heavy = [HeavyKeys.empty(*of, key, value) for of in zip(counts, scores, strict=True)]
        found._state = State.empty(parts.means, key, value)
        return found

    def make_room(self, query: Tensor | None, key: Tensor, value: Tensor) -> None:
        """There is no need: memory does not grow."""

    def take(self, query: Tensor | None, key: Tensor, value: Tensor, scale: float) -> Iterator[Tensor]:
        """The outputs of queries of new tokens, unit by unit."""
        state, done = self._state, 0
        while done < key.shape[2]:
            state = self._moved(state)
            stop = min(key.shape[2], done + self.parts.unit - state.length % self.parts.unit)
            new = Tokens.at(state.length, key[:, :, done:stop], value[:, :, done:stop])
            if query is None:
                state = state.append(new, sinks=self.parts.sinks)
            else:
                rows = working(query[:, :, done:stop]).unflatten(1, (key.shape[1], -1)) * scale
                state = state.append(new, rows, sinks=self.parts.sinks)
                yield attend(state, self._heavy, self.parts, self.plan.weights, rows).to(query.dtype)
            self._state, done = state, stop

    def select(self, index: Tensor) -> Summarised:
        found = self._remembering({name: tensor[index] for name, tensor in self.tensors().items()})
        found._before = [before.select(index) for before in self._before]
        return found

    def refusal(self, count: int) -> str | None:
        if count >= self._state.moved or any(before.state.moved <= count for before in self._before):
            return None
        return (
            f"expected at least {self._state.moved} tokens to stay: what came before is summarised by units of "
            f"{self.parts.unit} positions and cannot be undone"
        )

    def crop(self, count: int) -> None:
        while count < self._state.moved:
            before = self._before.pop()
            self._state, self._heavy = before.state, before.heavy
            self.generator.set_state(before.draws)
        self._state = self._state.crop(count)

    def merge(self, other: Summarised) -> None:
        length = self._state.length
        if length % self.parts.aligned:
            raise ValueError(
                f"other: expected this stream to stand at a multiple of {self.parts.aligned} tokens, got {length}"
            )
        self._state = self._merged(self._moved(self._state), other._state, other._heavy)
        self._before = []  # which know nothing of what came from the other

    def like(self) -> tuple[Tensor, Tensor]:
        return self._state.near.key, self._state.near.value

    def bytes(self) -> int:
        held = [*self.tensors().values(), *(part for before in self._before for part in before.tensors().values())]
        # What did not change between two units is held once.
        return sum({part.data_ptr(): part.numel() * part.element_size() for part in held if part.numel()}.values())

    def tensors(self) -> dict[str, Tensor]:
        found = tensors_of(self._state)
        for number, heavy in enumerate(self._heavy):
            found |= heavy.tensors(f"heavy{number}.")
        return found

    def facts(self) -> dict[str, Any]:
        return {"moved": self._state.moved}

    def restored(self, count: int, facts: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Summarised:
        rows, moved = check_rows(tensors, "near."), build(_Facts, facts).moved
        before = self.generator.get_state()
        found = self.begin(*rows)
        check_summarised(tensors, count, moved, self.parts, found._state, found._heavy)
        self.generator.set_state(before)
        found = self.begin(*rows)
        found._state = replace(found._state, length=count, moved=moved)
        return found._remembering(tensors)

    def _moved(self, state: State) -> State:
        """Everything takes its place for the unit that begins at `length`, if one does and nothing has moved yet."""
        parts, start = self.parts, state.length
        if start == state.moved or start % parts.unit:
            return state
        if self.undo:
            kept = [one.with_tensors(one.tensors(""), "") for one in self._heavy]
            now = _Before(state, kept, self.generator.get_state())
            self._before = [*(old for old in self._before if old.state.length > start - self.undo), now]
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

    def _remembering(self, tensors: Mapping[str, Tensor]) -> Summarised:
        """The same with the tensors of these names in place of its own; `KeyError` where one is missing."""
        found = Summarised(self.plan, self.generator, self.undo)
        found._state = with_tensors(self._state, tensors)
        found._heavy = [heavy.with_tensors(tensors, f"heavy{number}.") for number, heavy in enumerate(self._heavy)]
        return found
