"""The stream: append keys and values, attend with their queries, forget by plan.

    appended keys -> near (exact) -> sinks and heavy keys (exact) -> summary: means of everything else

What a query sees is what it sees under `attention(..., plan=plan, is_causal=True)`; what is kept depends on the plan
alone, not on the length.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from fewkeys.core.precision import full_precision, lowered, working
from fewkeys.core.validation import check_real, check_tensor
from fewkeys.core.weights import Softmax
from fewkeys.past.evicted import Evicted
from fewkeys.past.scan import advance
from fewkeys.past.state import State, tensors_of, with_tensors
from fewkeys.past.tokens import Tokens, unheld
from fewkeys.plan import Plan
from fewkeys.select.causal import CAUSAL_BLOCK
from fewkeys.streaming import files
from fewkeys.streaming.attend import attend
from fewkeys.streaming.checks import check_query, check_tokens
from fewkeys.streaming.heavy import HeavyKeys
from fewkeys.streaming.parts import parts_of


def stream(plan: Plan, *, scale: float | None = None, generator: torch.Generator | None = None) -> Stream:
    """An empty stream that runs a causal plan, such as `fewkeys.budget(slots, is_causal=True)`.

    Args:
        plan: `RecentBlocks` or `Window`, with any of `Sinks`, `Leverage(count)`, `KeyNorm`, `RandomKeys` beside it, and
            `RunningMeans` or `Drop` for the rest.
        scale: factor on the scores; default 1 / sqrt(D).
        generator: source of randomness for `RandomKeys`; default: seed 0.

    Raises `TypeError` or `ValueError` for a plan that no stream can run, naming the part.
    """
    return Stream(plan, scale=scale, generator=generator)


class Stream:
    """Attention over tokens that arrive in pieces of any size, in memory that the plan fixes.

        stream = fewkeys.stream(fewkeys.budget(96, is_causal=True))
        stream.append(key, value)        # (B, Hkv, N, D), (B, Hkv, N, Dv)
        output = stream.attend(query)    # (B, Hq, N, D) -> (B, Hq, N, Dv)

    Whole, in pieces or token by token, the outputs are those of `fewkeys.attention` on the whole sequence with the same
    plan, up to rounding. Per token: O(slots (D + Dv)), and every `unit` tokens one update of the summary. Without
    gradient.
    """

    def __init__(self, plan: Plan, *, scale: float | None = None, generator: torch.Generator | None = None) -> None:
        self.plan, self.parts = plan, parts_of(plan)
        self.scale = None if scale is None else check_real("scale", scale)
        # Drawn from as keys come, so that a saved stream can go on with the same draws.
        self.generator = torch.Generator("cpu").manual_seed(0) if generator is None else generator
        self.length = 0
        """Tokens seen, padding included."""
        self._tilted = isinstance(plan.weights, Softmax)
        self._state: State | None = None
        self._heavy: list[HeavyKeys] = []
        """Beside the state: the keys that the plan's heavy rules keep, one list for each."""
        self._pending: tuple[Tensor, Tensor, Tensor] | None = None

    @torch.no_grad()
    def append(self, key: Tensor, value: Tensor, key_mask: Tensor | None = None) -> None:
        """Add N tokens: keys (B, Hkv, N, D), values (B, Hkv, N, Dv); `key_mask` (B, N) is False for padding.

        Tokens that were appended earlier and never attended from are taken in without queries.
        """
        key, value, real = check_tokens(key, value, key_mask, self._like())
        self._settle()
        self._pending = (key, value, real)
        self.length += key.shape[2]

    @torch.no_grad()
    def attend(self, query: Tensor) -> Tensor:
        """The outputs (B, Hq, Nq, Dv) of the queries (B, Hq, Nq, D) of the last Nq tokens of the last `append`."""
        query = lowered(check_tensor("query", query))
        if self._pending is None:
            raise ValueError("query: expected tokens that were appended and not yet attended from; append them first")
        key, value, real = self._pending
        check_query(query, key)
        self._pending = None
        first = key.shape[2] - query.shape[2]
        if first:
            self._take(None, key[:, :, :first], value[:, :, :first], real[:, :first])
        return self._take(query, key[:, :, first:], value[:, :, first:], real[:, first:])

    def select(self, index: Tensor) -> None:
        """Keep the sequences `index` (M,) of the batch, in that order; an index may come several times."""
        if self._pending is not None:
            key, value, real = self._pending
            self._pending = (key[index], value[index], real[index])
        self._remember({name: tensor[index] for name, tensor in self._tensors().items()})

    def crop(self, length: int) -> None:
        """Forget the tokens from position `length` on, as if they had never come.

        Possible back to the beginning of the current unit of positions, whose keys have moved no memory yet. Raises
        `ValueError` beyond.
        """
        self._settle()
        if length == self.length:
            return
        least = 0 if self._state is None else self._state.moved
        if not isinstance(length, int) or not least <= length <= self.length:
            raise ValueError(
                f"length: expected {least} to {self.length}: what came before is summarised by units of "
                f"{self.parts.unit} positions and cannot be undone; got {length}. Save the stream before tokens that "
                "may be taken back"
            )
        if self._state is not None:
            self._state = self._state.crop(length)
        self.length = length

    @full_precision()
    @torch.no_grad()
    def merge(self, other: Stream) -> None:
        """Go on as if the tokens of `other`, a stream of the same plan, had come after these.

        `other` saw them without this past: its outputs are its own, and its memory becomes part of this one. Nothing is
        counted twice or lost. `self` must stand at a multiple of `parts.aligned` tokens, since blocks are of absolute
        positions. Raises `ValueError` for another plan or other shapes.
        """
        self._settle()
        other._settle()
        if self.plan != other.plan:
            raise ValueError(f"other: expected a stream of the plan {self.plan}, got one of {other.plan}")
        if self.length % self.parts.aligned:
            raise ValueError(
                f"other: expected this stream to stand at a multiple of {self.parts.aligned} tokens, got {self.length}"
            )
        if other._state is None:
            return
        if self._state is None:
            self._state = other._state
            self._heavy = [heavy.with_tensors(heavy.tensors(""), "") for heavy in other._heavy]
        else:
            self._state = self._merged(self._moved(self._state), other._state, other._heavy)
        self.length += other.length

    @property
    def batch(self) -> int | None:
        """Sequences in the batch; None before the first token."""
        return self._like()[0].shape[0] if self._like() else None

    def memory(self) -> int:
        """Bytes that the stream holds."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self._tensors().values())

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the stream to one safetensors file, whole or not at all; `Stream.load` goes on from it identically."""
        self._settle()
        facts = {"plan": self.plan.to_dict(), "scale": self.scale, "length": self.length}
        if self._state is None:
            files.write(path, facts, {})
            return
        tensors = self._tensors() | {"generator": self.generator.get_state()}
        files.write(path, {**facts, "moved": self._state.moved}, tensors)

    @classmethod
    def load(cls, path: str | os.PathLike[str], device: torch.device | str = "cpu") -> Stream:
        """The stream that `save` wrote, on `device`; `ValueError` names a damaged or foreign file."""
        facts, tensors = files.read(path, device)
        try:
            generator = torch.Generator("cpu")
            if tensors:
                generator.set_state(tensors.pop("generator").cpu())
            found = cls(Plan.from_dict(facts["plan"]), scale=facts["scale"], generator=generator)
            found.length = facts["length"]
            if tensors:
                state = found._begin(tensors["near.key"], tensors["near.value"])
                found._state = replace(state, length=facts["length"], moved=facts["moved"])
                found._remember(tensors)
        except (KeyError, TypeError) as error:
            raise ValueError(f"path: expected all that Stream.save writes, got {path} without {error}") from None
        return found

    def _settle(self) -> None:
        """Take in what was appended and never attended from."""
        if self._pending is not None:
            pending, self._pending = self._pending, None
            self._take(None, *pending)

    @full_precision()
    @torch.no_grad()
    def _take(self, query: Tensor | None, key: Tensor, value: Tensor, real: Tensor) -> Tensor:
        state, done, outputs = self._state or self._begin(key, value), 0, []
        scale = key.shape[-1] ** -0.5 if self.scale is None else self.scale
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

    def _tensors(self) -> dict[str, Tensor]:
        """Everything held, by name."""
        found = {} if self._state is None else tensors_of(self._state)
        for number, heavy in enumerate(self._heavy):
            found |= heavy.tensors(f"heavy{number}.")
        return found

    def _remember(self, tensors: Mapping[str, Tensor]) -> None:
        """Hold the tensors of these names in place of the present ones; `KeyError` where one is missing."""
        if self._state is not None:
            self._state = with_tensors(self._state, tensors)
        self._heavy = [heavy.with_tensors(tensors, f"heavy{number}.") for number, heavy in enumerate(self._heavy)]

    def _like(self) -> tuple[Tensor, ...]:
        """Keys and values that came before, if any did."""
        if self._pending is not None:
            return self._pending[:2]
        return () if self._state is None else (self._state.near.key, self._state.near.value)
