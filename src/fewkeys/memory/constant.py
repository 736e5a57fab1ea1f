"""Memory of a fixed size: near tokens and sinks, exactly, and means of all others.

Once squares of entries or scores may overflow (`fewkeys.core.extent`), everything is in float64: no scale would fit all
later entries.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from fewkeys.core.fields import DERIVED, Buffer, Fields
from fewkeys.core.precision import working
from fewkeys.core.tensor_files import Form, check
from fewkeys.core.weights import Softmax, positive
from fewkeys.memory.checks import Kind
from fewkeys.memory.rows import Rules
from fewkeys.plan import Plan
from fewkeys.select.base import Recent
from fewkeys.sketch.summary import Summary, moments

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

    exact (B, Hkv, K, D + Dv): keys and values, side by side, of the sinks and of the latest of `count` tokens; summary
    and squares, which `moments` reads: of the keys and queries before the current unit; unit_queries
    (B, Hkv, gqa_ratio, M, D + 1): `[q, 1]` of the scaled queries q of the unit's M tokens, zero for tokens without;
    before: the memories at the ends of the latest units, for `crop`.
    """

    rules: Rules
    parts: Parts
    kind: Kind
    """Of the tokens as they come."""
    count: int
    exact: Tensor
    summary: Summary
    squares: Tensor
    unit_queries: Tensor
    before: tuple[Constant, ...] = field(default=(), metadata=DERIVED)

    buffers: ClassVar[tuple[Buffer, ...]] = ()

    @staticmethod
    def begin(rules: Rules, kind: Kind) -> Constant:
        parts, exact = parts_of(rules.plan), torch.cat(kind.no_tokens(), -1)
        summary = Summary.empty(parts.means, working(exact))
        squares = summary.rows.new_zeros((kind.batch, kind.heads, kind.dim + 1, kind.dim + 1))
        return Constant(rules, parts, kind, 0, exact, summary, squares, squares[:, :, None, :0])

    @property
    def moved(self) -> int:
        """The number of tokens before the current unit."""
        return self.count - self.unit_queries.shape[3]

    @property
    def fewest(self) -> int:
        return self.before[0].moved if self.before else self.moved

    def extend(
        self, query: Tensor | None, key: Tensor, value: Tensor, scale: float, is_large: bool
    ) -> tuple[Constant, Tensor | None]:
        memory = self.changed(Tensor.double) if is_large else self
        rows, asked = torch.cat([key, value], -1).to(memory.exact), memory.unit_queries
        if query is None:
            asked = asked.new_zeros((*asked.shape[:3], key.shape[2], asked.shape[4]))
        else:
            asked = pad(query.to(asked).unflatten(1, (key.shape[1], -1)) * scale, (0, 1), value=1.0)
        outputs, done, unit = [], 0, self.parts.unit
        while done < key.shape[2]:
            stop = min(key.shape[2], done + unit - memory.count % unit)
            memory = memory._begin_unit()._append(rows[:, :, done:stop], asked[:, :, :, done:stop])
            if query is not None:
                outputs.append(memory._attend(stop - done))
            done = stop
        return memory, torch.cat(outputs, 2).to(self.kind.dtype) if outputs else None

    def crop(self, count: int) -> Constant:
        numbers = [number for number, memory in enumerate(self.before) if count < memory.count]
        memory = replace(self.before[numbers[0]], before=self.before[: numbers[0]]) if numbers else self
        gone = memory.count - count
        exact = memory.exact[:, :, : memory.exact.shape[2] - gone]
        asked = memory.unit_queries[:, :, :, : memory.unit_queries.shape[3] - gone]
        return replace(memory, count=count, exact=exact, unit_queries=asked)

    def filled(self, count: int, tensors: Mapping[str, Tensor]) -> Constant:
        """This empty memory with `count` tokens of a file; `ValueError` unless they are memory of such a plan."""
        empty = self.changed(Tensor.double) if tensors["exact"].dtype == torch.float64 else self
        free = {"exact": (2,), "unit_queries": (2, 3)}
        forms = {}
        for name, part in empty.tensors().items():
            shape = [None if axis in free.get(name, ()) else size for axis, size in enumerate(part.shape)]
            forms[name] = Form(tuple(shape), part.dtype, infinite=name == "summary.excess")
        check(tensors, forms)
        memory, parts = replace(empty.with_tensors(tensors), count=count), self.parts
        moved, first, sinks = memory.moved, memory._first, min(count, parts.sinks)
        if not 0 <= count - moved <= parts.unit or moved < 0 or moved % parts.unit:
            raise ValueError(f"expected a unit of {parts.unit} positions, got one from {moved} to {count}")
        if not sinks <= first <= max(sinks, parts.needed_from(moved)):
            raise ValueError(f"expected the near tokens that the plan needs after {count}, got those from {first}")
        return memory

    @property
    def _first(self) -> int:
        """The place of the first exact token behind the sinks."""
        return self.count - self.exact.shape[2] + min(self.count, self.parts.sinks)

    def _begin_unit(self) -> Constant:
        """Where a unit begins, evicted keys enter the summary, and near tokens that no query needs are dropped."""
        parts, place = self.parts, self.count
        if place == self.moved or place % parts.unit:
            return self
        sinks, first = min(place, parts.sinks), self._first

        def index(position: int) -> int:
            return sinks + max(0, position - first)

        asked = self.unit_queries.flatten(2, 3)
        squares, summary = self.squares + asked.mT @ asked, self.summary
        rows = working(self.exact[:, :, index(parts.near_from(place - 1)) : index(parts.near_from(place))])
        if rows.shape[2] and parts.means:
            real = torch.ones(rows.shape[:3], dtype=torch.bool, device=rows.device)
            tilted = isinstance(self.rules.plan.weights, Softmax)
            summary = summary.absorb(rows, real, moments(squares), tilted=tilted)
        exact = torch.cat([self.exact[:, :, :sinks], self.exact[:, :, index(parts.needed_from(place)) :]], 2)
        ends = (*self.before, replace(self, before=()))
        return replace(
            self,
            exact=exact,
            summary=summary,
            squares=squares,
            unit_queries=self.unit_queries[:, :, :, :0],
            before=tuple(end for end in ends if end.count > place - self.rules.undo),
        )

    def _append(self, rows: Tensor, asked: Tensor) -> Constant:
        """The memory with more tokens of the unit, and their rows of `unit_queries`."""
        before = self.unit_queries
        if before.shape[2] != asked.shape[2]:  # there has been no query yet
            before = before[:, :, :1].expand(-1, -1, asked.shape[2], -1, -1)
        return replace(
            self,
            count=self.count + rows.shape[2],
            exact=torch.cat([self.exact, rows], 2),
            unit_queries=torch.cat([before, asked], 3),
        )

    def _attend(self, queries: int) -> Tensor:
        """Outputs (B, Hq, M, Dv), in working precision, of the last M queries of a unit. Cost O(M slots (D + Dv))."""
        parts, weights, held, dim = self.parts, self.rules.plan.weights, self.exact.shape[2], self.kind.dim
        query, rows = self.unit_queries[:, :, :, -queries:, :-1], working(self.exact)
        if parts.means:
            rows = torch.cat([rows, self.summary.rows], 2)
        score = torch.unflatten(query.flatten(2, 3) @ rows[..., :dim].mT, 2, query.shape[2:4])
        first, is_tilted = self.count - queries, isinstance(weights, Softmax)
        position = torch.arange(first, self.count, device=rows.device)[:, None]
        place = torch.arange(self.count - held, self.count, device=rows.device)  # that of sinks is earlier
        hidden = place < (position + 1 - parts.window).clamp_max(parts.near_from(first))
        hidden[:, : parts.sinks] = False
        score[..., :held].masked_fill_(hidden | (place > position), -math.inf)
        size = self.summary.size[:, :, None, None]
        if parts.means:
            score[..., held:] += self.summary.excess[:, :, None, None] if is_tilted else size.log().clamp_max(0.0)
        (weight,) = weights.kernel([score])
        if not is_tilted:
            weight[..., held:] *= size
        weight = weight.flatten(2, 3)
        mixed = weight @ rows[..., dim:] / positive(weight.sum(-1, keepdim=True))
        return torch.unflatten(mixed, 2, query.shape[2:4]).flatten(1, 2)
