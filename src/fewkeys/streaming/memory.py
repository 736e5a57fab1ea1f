"""How a stream drives its state: when a unit of positions is complete, and which keys leave then."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from fewkeys.core.precision import working
from fewkeys.core.weights import Softmax
from fewkeys.past.evicted import Evicted
from fewkeys.past.scan import advance
from fewkeys.past.state import State, tensors_of, with_tensors
from fewkeys.past.tokens import Tokens, unheld
from fewkeys.plan import Plan
from fewkeys.select.causal import CAUSAL_BLOCK
from fewkeys.streaming.attend import attend
from fewkeys.streaming.heavy import HeavyKeys
from fewkeys.streaming.parts import Parts


class Memory:
    """The state of a stream, and beside it the keys that the plan's heavy rules keep, one list for each."""

    def __init__(self, plan: Plan, parts: Parts, key: Tensor, value: Tensor, generator: torch.Generator | None) -> None:
        self.plan, self.parts = plan, parts
        self.state = State.empty(parts.means, key, value)
        self.heavy = [HeavyKeys.empty(part.count, part.online(generator), key, value) for part in parts.heavy]

    @property
    def tilted(self) -> bool:
        return isinstance(self.plan.weights, Softmax)

    def append(self, key: Tensor, value: Tensor, real: Tensor, query: Tensor | None, scale: float) -> Tensor | None:
        """Add tokens that do not reach beyond the current unit, `real` (B, N), and answer their queries, if any."""
        self.move()
        new = Tokens.at(self.state.length, key, value, real)
        rows = None if query is None else working(query).unflatten(1, (key.shape[1], -1)) * scale
        self.state = self.state.append(new, rows, sinks=self.parts.sinks)
        if query is None or rows is None:
            return None
        return attend(self.state, self.heavy, self.parts, self.plan.weights, rows).to(query.dtype)

    def move(self) -> None:
        """Let everything take its place for the unit that begins at `length`, if one does and nothing has moved yet."""
        state, parts = self.state, self.parts
        start = state.length
        if start == state.moved or start % parts.unit:
            return
        released = [heavy.rows for heavy in self.heavy]
        if self.heavy and start % CAUSAL_BLOCK == 0:
            complete = state.between(range(start - CAUSAL_BLOCK, start))
            for heavy in self.heavy:
                heavy.offer(complete)
        if parts.means:
            reach = parts.near_from(start)
            leaving = state.between(range(parts.near_from(start - 1), reach))
            evicted = Evicted.at_once(unheld([leaving, *released], self._kept(state), reach))
            _, state = advance(state, evicted, parts.unit, tilted=self.tilted)
        else:
            state = replace(state, moved=start, asked=state.asked[:, :, :, :0], answered=state.answered[:, :0])
        self.state = state.trim(parts.needed_from(start))

    def merge(self, other: Memory) -> None:
        """Take over the memory of tokens that came after these; `length` is a multiple of `parts.aligned`."""
        self.move()
        state, parts, start = self.state, self.parts, self.state.length
        merged = state.merge(other.state, sinks=parts.sinks, tilted=self.tilted)
        released = [other.state.sinks.moved(start)]
        for own, theirs in zip(self.heavy, other.heavy, strict=True):
            rows = theirs.rows.moved(start)
            released += [own.rows, rows]
            own.join(rows, theirs)
        if parts.means:
            reach = parts.near_from(merged.moved)
            leaving = state.between(range(parts.near_from(start), reach))
            merged = merged.absorb(unheld([leaving, *released], self._kept(merged), reach), tilted=self.tilted)
        self.state = merged.trim(parts.needed_from(merged.moved))

    def each(self, change: Callable[[Tensor], Tensor]) -> Memory:
        """A memory of the same form whose tensors, all with the batch first, are changed alike."""
        return self.with_tensors({name: change(tensor) for name, tensor in self.tensors().items()})

    def tensors(self) -> dict[str, Tensor]:
        """Everything remembered, by name."""
        found = tensors_of(self.state)
        for number, heavy in enumerate(self.heavy):
            found |= heavy.tensors(f"heavy{number}.")
        return found

    def with_tensors(self, tensors: Mapping[str, Tensor]) -> Memory:
        """A memory that remembers the tensors of these names in place of its own; `KeyError` where one is missing."""
        found = copy.copy(self)
        found.state = with_tensors(self.state, tensors)
        found.heavy = [one.with_tensors(tensors, f"heavy{number}.") for number, one in enumerate(self.heavy)]
        return found

    def size(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors().values())

    def _kept(self, state: State) -> list[Tokens]:
        return [state.sinks, *(heavy.rows for heavy in self.heavy)]
