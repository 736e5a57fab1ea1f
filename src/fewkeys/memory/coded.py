"""Memory of every token, with codes of the keys that each query scans: all is held, little is read.

    rows                 keys and values: as they come while exact attention is faster, then as they are to be held
    codes, sigma, sums   of every finished block of 32 of them

Tokens before `exact_length` are answered exactly, whatever comes later, and all others by the plan: so a token's answer
does not depend on the pieces that tokens come in. Numbers so large that codes need other units
(`fewkeys.core.extent`), which later ones may change, are coded again at every call.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from fewkeys.core.buffer import Buffer
from fewkeys.core.extent import needs_rescaling
from fewkeys.core.fields import DERIVED, Fields
from fewkeys.core.graph import Graph
from fewkeys.core.inputs import Inputs
from fewkeys.core.precision import working
from fewkeys.core.records import build
from fewkeys.core.validation import largest_entries
from fewkeys.cost.decoding import exact_length
from fewkeys.execute import dispatch, exact, native
from fewkeys.execute.native.by_scan import ScanCall
from fewkeys.execute.problem import Problem
from fewkeys.flow import attend
from fewkeys.memory.base import Held, Rules, named_dtype
from fewkeys.memory.rows import HeldRows
from fewkeys.plan import Plan
from fewkeys.rest import BlockMeans
from fewkeys.rest.block_means import block_sums
from fewkeys.select.key_scan import Scanned, codes_of
from fewkeys.sketch.codes import BLOCK, Codes, Frame, encode

LEAST = 8
"""Blocks that there is room for at first."""
AS_THEY_COME = Held()


@dataclass(frozen=True)
class _Facts:
    """What `Coded.facts` gives."""

    dtype: str


@dataclass(frozen=True, eq=False)
class Coded(Fields):
    """What sequences leave under `KeyScan` (`fewkeys.memory.base.Memory`).

    A block is coded once, from keys as they are held; tokens are taken back by forgetting the last ones. codes
    (B, Hkv, blocks, W / 2 * 16), sigma (B, Hkv, blocks, 32); sums (B, Hkv, 1 + blocks, D + Dv): over all keys and
    values before each block, and before the end.
    """

    rules: Rules
    rows: HeldRows
    later: HeldRows | None = field(metadata=DERIVED)
    """Where `rows` go once exact attention is slower; None: they are there."""
    codes: Buffer = field(metadata=DERIVED)
    sigma: Buffer = field(metadata=DERIVED)
    sums: Buffer = field(metadata=DERIVED)
    is_large: bool = False
    exact_until: int | None = None
    """How many first tokens are answered exactly; None before the first query."""
    step: Step | None = None
    """How the last token was answered."""

    @staticmethod
    def check(plan: Plan) -> None:
        if len(plan.parts) != 1:
            raise ValueError(f"plan: a stream keeps KeyScan alone, without rules beside it, got {plan.keep}")

    @staticmethod
    def begin(rules: Rules, key: Tensor, value: Tensor) -> Coded:
        rows, later = HeldRows.empty(rules.how, key, value), None
        if rules.plan.exact_if_faster and rules.how != AS_THEY_COME:
            rows, later = HeldRows.empty(AS_THEY_COME, key, value), rows
        none = working(key[:, :, :0])
        codes = encode(none, Frame.of(none))
        zero = none.new_zeros((*none.shape[:2], 1, key.shape[3] + value.shape[3]), dtype=torch.float64)
        blocks = (codes.packed.flatten(3), codes.sigma.unflatten(2, (-1, BLOCK)), zero)
        packed, sigma, sums = (Buffer(part, part.shape[2], LEAST) for part in blocks)
        return Coded(rules, rows, later, packed, sigma, sums)

    @property
    def dtype(self) -> torch.dtype:
        return self.rows.dtype

    def make_room(self, query: Tensor | None, key: Tensor, value: Tensor) -> None:
        total = self.rows.count + key.shape[2]
        if self.later is None:
            self.rows.make_room(total)
        elif query is not None and total > exact_length(self.rules.plan, query, key, value, _one_token):
            self.later.make_room(total)

    def take(
        self, query: Tensor | None, key: Tensor, value: Tensor, scale: float, is_large: bool
    ) -> tuple[Coded, Tensor | None]:
        memory = replace(self, is_large=True) if is_large and not self.is_large else self
        if query is None:
            memory.rows.append(key, value)
            return memory, None
        if memory.exact_until is None:
            until = exact_length(self.rules.plan, query, key, value, _one_token)
            memory = replace(memory, exact_until=until)
        first = memory.exact_until - memory.rows.count  # type: ignore[operator]
        if first <= 0:
            return memory._take(query, key, value, scale, by_plan=True)
        if first >= key.shape[2]:
            return memory._take(query, key, value, scale, by_plan=False)
        (query, later_query), (key, later_key), (value, later_value) = (
            rows.split([first, rows.shape[2] - first], 2) for rows in (query, key, value)
        )
        memory, exactly = memory._take(query, key, value, scale, by_plan=False)
        memory, by_plan = memory._take(later_query, later_key, later_value, scale, by_plan=True)
        return memory, torch.cat([exactly, by_plan], 2)

    def select(self, index: Tensor) -> Coded:
        return replace(super().select(index), step=None)

    def refusal(self, count: int) -> str | None:
        return None

    def crop(self, count: int) -> Coded:
        for part in self.rows.buffers:
            part.count = count
        for part in (self.codes, self.sigma, self.sums):
            part.count = min(part.count, count // BLOCK + (part is self.sums))
        return self

    def merge(self, other: Coded) -> Coded:
        memory = replace(self, is_large=self.is_large or other.is_large)
        memory = memory._closed() if other.later is None else memory
        memory.rows.join(other.rows)
        return memory

    def like(self) -> tuple[Tensor, Tensor]:
        return self.rows.key.rows, self.rows.value.rows

    def facts(self) -> dict[str, Any]:
        return {"dtype": str(self.dtype)}

    @staticmethod
    def restored(rules: Rules, count: int, facts: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Coded:
        rows = HeldRows.checked(tensors, named_dtype(build(_Facts, facts).dtype), "rows.")
        if rows.scale is not None and rules.how.dtype != "int8":
            raise ValueError("expected keys as they came, got some in int8")
        if rows.count != count:
            raise ValueError(f"expected the keys of {count} tokens, got {rows.count}")
        key, value = rows.read(0, count)
        sizes = (0.0, *largest_entries(key, value))
        large = needs_rescaling(sizes, 1.0, key.shape[3], working(key[:0]).dtype)
        memory = replace(Coded.begin(rules, key.to(rows.dtype), value.to(rows.dtype)), is_large=large)
        memory = memory._closed() if rows.scale is not None else memory
        memory.rows.join(rows)
        return memory

    def _closed(self) -> Coded:
        """With what came so far as it is to be held."""
        if self.later is None:
            return self
        self.later.join(self.rows)
        return replace(self, rows=self.later, later=None)

    def _take(self, query: Tensor, key: Tensor, value: Tensor, scale: float, by_plan: bool) -> tuple[Coded, Tensor]:
        memory = self._closed() if by_plan else self
        memory.rows.append(key, value)
        if not by_plan:
            return memory, exact.attend(memory._inputs(query, scale), self.rules.plan.weights)
        if memory.is_large:
            return memory, attend(memory._inputs(query, scale), self.rules.plan.never_exact())
        memory._finish_blocks()
        if query.shape[2] > 1:
            return memory, dispatch.attend(memory.problem(query, scale))
        if memory.step is None or not memory.step.serves(memory, query, scale):
            memory = replace(memory, step=Step.of(memory, query, scale))
        return memory, memory.step.attend(memory, query, scale)  # type: ignore[union-attr]

    def held(self) -> tuple[Tensor, ...]:
        """All memory that a kernel reads."""
        return tuple(buffer.held for buffer in (*self.rows.buffers, self.codes, self.sigma, self.sums))

    def _inputs(self, query: Tensor, scale: float) -> Inputs:
        key, value = (rows.to(query.dtype) for rows in self.rows.read(0, self.rows.count))
        offset = key.shape[2] - query.shape[2]
        return Inputs(query, key, value, scale, is_causal=True, offset=offset, needs_rescaling=self.is_large)

    def problem(self, query: Tensor, scale: float) -> Problem:
        """What is left to the executor: the last tokens' queries (B, Hq, N, D), and codes and sums of all blocks."""
        key, value, scales = self.rows.key.rows, self.rows.value.rows, self.rows.scale
        inputs = Inputs(query, key, value, scale, is_causal=True, offset=key.shape[2] - query.shape[2])
        packed, sigma = self.codes.rows, self.sigma.rows
        head, wide = packed.shape[:3], packed.shape[3]
        codes = Codes(packed.view(*head, wide // 16, 16), sigma.view(*head[:2], head[2] * BLOCK))
        plan, rest = self.rules.plan, self.rules.plan.rest
        scanned = Scanned(inputs, codes, plan.scanned, None if scales is None else scales.rows)
        stand_ins = rest.of_totals(inputs, self.sums.rows, None) if isinstance(rest, BlockMeans) else None
        return Problem(inputs, Graph(inputs, scan=scanned), stand_ins, plan.weights)

    def _finish_blocks(self) -> None:
        """Codes and sums of the blocks that are finished and have none yet."""
        start, stop = self.codes.count * BLOCK, self.rows.count // BLOCK * BLOCK
        if start == stop:
            return
        key, value = self.rows.read(start, stop)
        codes = codes_of(key, Frame.of(self.rows.read(0, BLOCK)[0]), "auto")
        self.codes.append(codes.packed.flatten(3))
        self.sigma.append(codes.sigma.unflatten(2, (-1, BLOCK)))
        new = torch.cat([block_sums(key), block_sums(value)], -1)
        self.sums.append(self.sums.rows[:, :, -1:] + new.cumsum(2))


@dataclass(frozen=True, eq=False)
class Step:
    """How a token is answered by the plan: all tokens of a block of 32 see the same codes, sums and ranges.

    `call`: arguments of the kernel that serve the whole block; None: every token poses its problem anew.
    """

    shape: torch.Size
    scale: float
    block: int
    held: tuple[Tensor, ...]
    call: ScanCall | None

    @staticmethod
    def of(memory: Coded, query: Tensor, scale: float) -> Step:
        block = (memory.rows.count - 1) // BLOCK
        return Step(query.shape, scale, block, memory.held(), native.repeated(memory.problem(query, scale)))

    def serves(self, memory: Coded, query: Tensor, scale: float) -> bool:
        """Whether the next token is one of the same block, after tokens in the same memory."""
        same = (self.shape, self.scale, self.block) == (query.shape, scale, (memory.rows.count - 1) // BLOCK)
        return same and all(mine is theirs for mine, theirs in zip(self.held, memory.held(), strict=True))

    def attend(self, memory: Coded, query: Tensor, scale: float) -> Tensor:
        """The output (B, Hq, 1, Dv) of the last token's query."""
        if self.call is None:
            return dispatch.attend(memory.problem(query, scale))
        return self.call.attend(query, memory.rows.count, memory.rows.count - 1)

    def __deepcopy__(self, memo: object) -> None:
        """A copy of the memory finds its own."""


def _one_token(plan: Plan, inputs: Inputs) -> tuple[Callable[[], object], Callable[[], object]]:
    """What takes one token more, answered exactly and by the plan, after those of the inputs."""
    x, rules = inputs, Rules(plan.never_exact(), AS_THEY_COME, 0)
    memories = [Coded.begin(rules, x.key, x.value) for _ in range(2)]
    for memory in memories:
        memory.rows.append(x.key, x.value)
    token = (x.query, x.key[:, :, -1:], x.value[:, :, -1:], x.scale)

    def exactly() -> Tensor:
        return memories[0]._take(*token, by_plan=False)[1]

    def by_plan() -> Tensor:
        return memories[1]._take(*token, by_plan=True)[1]

    return exactly, by_plan
