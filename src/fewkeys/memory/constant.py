"""Memory of a fixed size: near tokens and sinks, exactly, and means of all others.

Once squares of entries (`fewkeys.core.extent`) or of scores may overflow, everything is in float64: no scale would fit
all later entries.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from fewkeys.core.extent import LARGEST
from fewkeys.core.fields import DERIVED, Buffer, Fields
from fewkeys.core.precision import working
from fewkeys.core.tensor_files import Form, check
from fewkeys.core.weights import Softmax, Weights, positive
from fewkeys.memory.checks import Kind
from fewkeys.memory.files import SavedFacts
from fewkeys.memory.rows import Rules, named_rows
from fewkeys.past.state import State
from fewkeys.plan import Plan
from fewkeys.select.base import Recent

STRONGEST = 56
"""log2 of the score that summaries can square in float32."""
NEVER = 2**62
"""A position that no sequence reaches."""


@dataclass(frozen=True)
class Parts:
    """The numbers of a plan. Queries of a `unit`, a recent block or 32 positions, see the same summary."""

    window: int
    recent: Recent | None
    sinks: int
    means: int
    unit: int

    def near_from(self, position: int) -> int:
        """The first position in the recent blocks of the query at `position`; `NEVER` without recent blocks."""
        if self.recent is None:
            return NEVER
        return max(0, (position // self.recent.size - self.recent.blocks + 1) * self.recent.size)

    def needed_from(self, position: int) -> int:
        """The first position whose key the query at `position` may need."""
        return max(0, min(self.near_from(position), position - self.window + 1))


def parts_of(plan: Plan) -> Parts:
    """The parts of a plan; `ValueError` or `TypeError` if no stream supports it."""
    if not isinstance(plan, Plan):
        raise TypeError(f"plan: expected a fewkeys.Plan, got {type(plan).__name__}; budget(slots, is_causal=True)")
    if plan.keep is None:
        raise ValueError("plan: exact attention must remember every key, so there is no stream of it; give keep=")
    window = sinks = 0
    recent: Recent | None = None
    for part in plan.parts:
        past = part.remembered
        if past is None or past.scan or (past.recent is not None and recent is not None):
            raise ValueError(f"plan: a stream keeps one RecentBlocks or a Window, and Sinks beside it, got {part}")
        window, sinks, recent = max(window, past.latest), max(sinks, past.first), past.recent or recent
    if plan.rest.running is None:
        raise ValueError(
            f"plan: a stream remembers the rest as RunningMeans(count) or drops it, got {plan.rest}; "
            "use budget(slots, is_causal=True)"
        )
    return Parts(window, recent, sinks, plan.rest.running, 32 if recent is None else recent.size)


@dataclass(frozen=True, eq=False)
class Constant(Fields):
    """The memory of all plans but `KeyScan`; its methods are those of `Coded`.

    dtype: of the tokens as they come; before: the states at the ends of the latest units, for `crop`.
    """

    rules: Rules
    parts: Parts
    dtype: torch.dtype
    state: State
    before: tuple[State, ...] = field(default=(), metadata=DERIVED)

    @staticmethod
    def begin(rules: Rules, key: Tensor, value: Tensor) -> Constant:
        parts = parts_of(rules.plan)
        return Constant(rules, parts, key.dtype, State.empty(parts.means, key, value))

    @property
    def kind(self) -> Kind:
        return Kind.of(self.state.near.key, self.state.near.value, self.dtype)

    @property
    def buffers(self) -> tuple[Buffer, ...]:
        return ()

    @property
    def fewest(self) -> int:
        return self.before[0].moved if self.before else self.state.moved

    def extend(
        self, query: Tensor | None, key: Tensor, value: Tensor, scale: float, is_large: bool
    ) -> tuple[Constant, Tensor | None]:
        memory = self._in_float64() if is_large else self
        parts, outputs, done = self.parts, [], 0
        while done < key.shape[2]:
            memory = memory._begin_unit()
            state = memory.state
            key, value = (rows.to(state.near.key.dtype) for rows in (key, value))
            stop = min(key.shape[2], done + parts.unit - state.length % parts.unit)
            rows = None
            if query is not None:
                rows = query[:, :, done:stop].to(state.unit_queries.dtype).unflatten(1, (key.shape[1], -1)) * scale
            state = state.append(key[:, :, done:stop], value[:, :, done:stop], rows, parts.sinks)
            if rows is not None:
                outputs.append(_attend(state, parts, self.rules.plan.weights, rows))
            memory, done = replace(memory, state=state), stop
        return memory, torch.cat(outputs, 2).to(self.dtype) if outputs else None

    def crop(self, count: int) -> Constant:
        if count < self.fewest:  # none stays
            empty = State.empty(self.parts.means, self.state.near.key, self.state.near.value)
            return replace(self, state=empty, before=())
        state, before = self.state, [*self.before]
        while count < state.moved:
            state = before.pop()
        return replace(self, state=state.crop(count), before=tuple(before))

    def facts(self) -> dict[str, Any]:
        return {"moved": self.state.moved, "dtype": str(self.dtype)}

    @staticmethod
    def restored(rules: Rules, count: int, facts: SavedFacts, tensors: Mapping[str, Tensor]) -> Constant:
        if facts.moved is None:
            raise ValueError("expected the number of moved tokens, got none")
        dtype, (key, value) = facts.torch_dtype(), named_rows(tensors, "state.near.")
        if key.dtype not in (dtype, torch.float64):
            raise ValueError(f"expected tokens of {dtype} to be held as they came or in float64, got {key.dtype}")
        empty = Constant.begin(rules, key, value)
        _check(tensors, count, facts.moved, empty)
        memory = empty.with_tensors(tensors)
        near = replace(memory.state.near, first=count - key.shape[2])
        memory = replace(memory, dtype=dtype, state=replace(memory.state, moved=facts.moved, near=near))
        return memory._in_float64() if _hold_large(tensors) else memory

    def _in_float64(self) -> Constant:
        if self.state.near.key.dtype == torch.float64:
            return self
        return self.changed(lambda part: part.double() if part.is_floating_point() else part)

    def _begin_unit(self) -> Constant:
        """Where a unit begins, evicted keys enter the summary, and near tokens that no query needs are dropped."""
        parts, place = self.parts, self.state.length
        if place == self.state.moved or place % parts.unit:
            return self
        memory = self._in_float64() if _has_strong_scores(self.state) else self
        state, before = memory.state, memory.before
        if self.rules.undo:
            before = (*(old for old in before if old.length > place - self.rules.undo), state)
        tilted = isinstance(self.rules.plan.weights, Softmax)
        state = state.advance(parts.near_from(place - 1), parts.near_from(place), tilted=tilted)
        near = state.near.between(parts.needed_from(place), place)
        return replace(memory, state=replace(state, near=near), before=before)


def _attend(state: State, parts: Parts, weights: Weights, query: Tensor) -> Tensor:
    """Outputs (B, Hq, M, Dv), in working precision, of the scaled queries (B, Hkv, gqa_ratio, M, D) of the last M
    tokens of a unit. Cost O(M slots (D + Dv)).
    """
    near, sinks, summary, rows = state.near, state.sinks, state.summary, query.flatten(2, 3)
    shape, tilted = query.shape[2:4], isinstance(weights, Softmax)

    def scores(key: Tensor) -> Tensor:
        return torch.unflatten(rows @ working(key).mT, 2, shape)

    first = state.length - shape[1]
    places = torch.arange(first, state.length, device=query.device)[:, None]
    place = torch.arange(near.first, near.stop, device=query.device)
    seen = ((place > places - parts.window) | (place >= parts.near_from(first))) & (place <= places)
    sources = [(scores(near.key).masked_fill_(~seen, -math.inf), near.value)]
    if sinks.count:
        hidden = torch.arange(sinks.count, device=query.device) > places
        # Sinks that are near tokens, too, count once.
        hidden[:, near.first :] |= seen[:, : max(0, sinks.count - near.first)]
        sources.append((scores(sinks.key).masked_fill_(hidden, -math.inf), sinks.value))
    if summary.count:
        bias = summary.excess if tilted else summary.size.log().clamp_max(0.0)
        sources.append((scores(summary.key) + bias[:, :, None, None], summary.value))
    weight = weights.kernel([score for score, _ in sources])
    if summary.count and not tilted:
        weight[-1] = weight[-1] * summary.size[:, :, None, None]
    flat = [part.flatten(2, 3) for part in weight]
    total = reduce(torch.add, (part.sum(-1, keepdim=True) for part in flat))
    mixed = reduce(torch.add, (part @ working(value) for part, (_, value) in zip(flat, sources, strict=True)))
    return torch.unflatten(mixed / positive(total), 2, shape).flatten(1, 2)


def _has_strong_scores(state: State) -> bool:
    """Whether squares of scores may overflow in the summary: of keys and queries of different calls, too."""
    keys = [float(key.abs().max()) for key in (state.near.key, state.summary.key) if key.numel()]
    if len(keys) < 2 or state.near.key.dtype == torch.float64:
        return False
    queries = state.queries.add(state.unit_queries, state.has_query).moments().second
    query = math.sqrt(float(queries.diagonal(dim1=-2, dim2=-1).max()))
    return query * max(keys) * state.near.key.shape[3] > 2.0**STRONGEST


def _check(tensors: Mapping[str, Tensor], length: int, moved: int, empty: Constant) -> None:
    """Raise `ValueError` unless the tensors are memory of such a plan: kernels trust every shape."""
    parts, since = empty.parts, length - moved
    if moved < 0 or not 0 <= since <= parts.unit or moved % parts.unit:
        raise ValueError(f"expected a unit of {parts.unit} positions, got one from {moved} to {length}")
    near, queries = tensors["state.near.key"].shape[2], tensors["state.unit_queries"]
    if not length - parts.needed_from(moved) <= near <= length:
        raise ValueError(f"expected the near tokens that the plan needs after {length}, got {near}")
    sizes: dict[str, dict[int, int]] = {
        "state.near": {2: near},
        "state.sinks": {2: min(parts.sinks, length)},
        "state.unit_queries": {2: max(1, queries.shape[2]) if queries.ndim > 2 else 1, 3: since},
        "state.has_query": {1: since},
    }
    forms = {}
    for name, like in empty.tensors().items():
        expected = sizes.get(name.removesuffix(".key").removesuffix(".value"), {})
        shape = tuple(expected.get(axis, size) for axis, size in enumerate(like.shape))
        least = 0.0 if name.endswith((".size", ".count", "seen.square")) else -math.inf
        forms[name] = Form(shape, like.dtype, least, infinite=name == "state.summary.excess")
    check(tensors, forms)
    size, excess = tensors["state.summary.size"], tensors["state.summary.excess"]
    if not torch.equal(excess.isinf(), size == 0) or bool((excess == torch.inf).any()):
        raise ValueError("expected an excess of -inf at the free places of the summary alone, got it elsewhere")
    if bool((size.sum(-1) > tensors["state.summary.seen.count"].clamp_max(length)).any()):
        raise ValueError("expected a summary of keys that were seen, got more")
    if bool((tensors["state.queries.square"].diagonal(dim1=-2, dim2=-1) < 0).any()):
        raise ValueError("expected squares of queries, got negative ones")


def _hold_large(tensors: Mapping[str, Tensor]) -> bool:
    """Whether rows, or sums of their squares, are so large that memory must be in float64."""
    log = dict.fromkeys(("key", "value", "rows", "unit_queries", "total"), LARGEST) | {"square": 2 * LARGEST}
    limits = [(part, log.get(name.rpartition(".")[2])) for name, part in tensors.items() if part.numel()]
    return any(most is not None and float(part.abs().max()) > 2.0**most for part, most in limits)
