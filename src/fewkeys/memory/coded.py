"""Memory of every token, with codes of the keys. A query scans the codes and reads the few keys that it chooses.

The first tokens attend exactly, as many as `fewkeys.cost.decoding` says, and all later ones by the plan. Keys whose
squares may overflow are rescaled (`fewkeys.core.extent`) and coded again at every call, since a later key may change
the scale.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from fewkeys.core.extent import needs_rescaling
from fewkeys.core.fields import DERIVED, Buffer, Fields
from fewkeys.core.graph import Graph
from fewkeys.core.inputs import Inputs
from fewkeys.core.precision import autocast_is_on, working_dtype
from fewkeys.core.validation import largest_entries
from fewkeys.cost.decoding import exact_length
from fewkeys.execute import dispatch, exact, native
from fewkeys.execute.native.by_scan import ScanCall
from fewkeys.execute.problem import Problem
from fewkeys.flow import attend
from fewkeys.memory.checks import Kind
from fewkeys.memory.files import SavedFacts
from fewkeys.memory.rows import HeldRows, Rules
from fewkeys.native.build import LargeError
from fewkeys.native.tensors import placed
from fewkeys.plan import Plan
from fewkeys.rest import BlockMeans
from fewkeys.rest.block_means import block_sums
from fewkeys.select.key_scan import Scanned, codes_of
from fewkeys.sketch.codes import BLOCK, Codes, Frame, width

LEAST = 8
"""Blocks for which memory is allocated at first."""


@dataclass(frozen=True, eq=False)
class Coded(Fields):
    """The memory of `KeyScan`.

    Of complete blocks of 32 keys: codes (B, Hkv, blocks, W / 2 * 16), sigma (B, Hkv, blocks, 32), and sums (B, Hkv,
    1 + blocks, D + Dv) of all keys and values before each block and before the unfinished one.
    """

    rules: Rules
    rows: HeldRows
    later: HeldRows | None = field(metadata=DERIVED)
    """Replaces `rows`, in int8, once the plan answers; None: it has, or never will."""
    codes: Buffer = field(metadata=DERIVED)
    sigma: Buffer = field(metadata=DERIVED)
    sums: Buffer = field(metadata=DERIVED)
    is_large: bool = False
    exact_until: int | None = None
    """The number of first tokens that attend exactly; None before the first query."""
    step: _Step | None = None

    @staticmethod
    def begin(rules: Rules, key: Tensor, value: Tensor) -> Coded:
        """Memory without tokens, for keys (B, Hkv, any, D) and values (B, Hkv, any, Dv)."""
        rows, later = HeldRows.empty(rules.leaves, key, value), None
        if rules.plan.exact_if_faster and rules.leaves != "model":
            rows, later = HeldRows.empty("model", key, value), rows
        heads, bytes_of_block = key.shape[:2], width(key.shape[3]) * BLOCK // 4
        blocks = (
            key.new_empty((*heads, 0, bytes_of_block), dtype=torch.uint8),
            key.new_empty((*heads, 0, BLOCK), dtype=torch.int16),
            key.new_zeros((*heads, 1, key.shape[3] + value.shape[3]), dtype=torch.float64),
        )
        packed, sigma, sums = (Buffer(part, part.shape[2], LEAST) for part in blocks)
        return Coded(rules, rows, later, packed, sigma, sums)

    @property
    def kind(self) -> Kind:
        return Kind.of(self.rows.key.storage, self.rows.value.storage, self.rows.dtype)

    @property
    def buffers(self) -> tuple[Buffer, ...]:
        """What `extend` changes in place."""
        later = () if self.later is None else self.later.buffers
        return (*self.rows.buffers, *later, self.codes, self.sigma, self.sums)

    @property
    def fewest(self) -> int:
        """The smallest number of tokens, beside 0, that `crop` can leave."""
        return 0

    def extend(
        self, query: Tensor | None, key: Tensor, value: Tensor, scale: float, is_large: bool
    ) -> tuple[Coded, Tensor | None]:
        """The memory with N more tokens, and the outputs of their queries (B, Hq, N, D), if any. `is_large`: squares of
        entries may overflow.
        """
        memory = replace(self, is_large=True) if is_large and not self.is_large else self
        if query is None:
            memory.rows.append(key, value)
            return memory, None
        if (until := self.exact_until) is None:
            until = exact_length(self.rules.plan, query, key, value, _one_token)
            memory = replace(memory, exact_until=until)
        first, outputs = max(until - self.rows.count, 0), []
        for by_plan, piece in ((False, slice(first)), (True, slice(first, None))):
            q, k, v = query[:, :, piece], key[:, :, piece], value[:, :, piece]
            if k.shape[2]:
                memory, output = memory._extend(q, k, v, scale, by_plan=by_plan)
                outputs.append(output)
        return memory, torch.cat(outputs, 2)

    def answer(self, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor | None:
        """Add a token and return the output of its query, by the kernel call of the token before; None, and no token is
        added, if that call does not serve it.
        """
        step, count = self.step, self.rows.count
        if step is None or self.is_large or self.exact_until is None or count < self.exact_until:
            return None
        if not self._stores(query, key, value) or not step.serves(self, query, scale, count // BLOCK):
            return None
        try:
            output = step.call.attend(query, count + 1, count, (key, value))
        except LargeError:
            return None
        for buffer in self.rows.buffers:
            buffer.count = count + 1
        return output

    def _stores(self, query: Tensor, key: Tensor, value: Tensor) -> bool:
        """Whether a kernel can store this token: there is room, and its rows are like the others."""
        if not placed(query, key, value) or autocast_is_on() or query.is_neg() or key.is_neg() or value.is_neg():
            return False
        rows = self.rows
        return (
            all(rows.count < buffer.storage.shape[2] for buffer in rows.buffers)
            and rows.dtype == query.dtype == key.dtype == value.dtype
            and key.shape == (*rows.key.storage.shape[:2], 1, rows.key.storage.shape[3])
            and value.shape == (*rows.key.storage.shape[:2], 1, rows.value.storage.shape[3])
        )

    def select(self, index: Tensor) -> Coded:
        return replace(super().select(index), step=None)

    def crop(self, count: int) -> Coded:
        for buffer in self.rows.buffers:
            buffer.count = count
        for buffer in (self.codes, self.sigma, self.sums):
            buffer.count = min(buffer.count, count // BLOCK + (buffer is self.sums))
        return replace(self, step=None)  # its block may come again with other codes

    def facts(self) -> dict[str, Any]:
        return {"dtype": str(self.rows.dtype)}

    @staticmethod
    def restored(rules: Rules, count: int, facts: SavedFacts, tensors: Mapping[str, Tensor]) -> Coded:
        """The memory of `count` tokens in a file; `ValueError` if it is not valid."""
        if facts.moved is not None:
            raise ValueError(f"expected no number of moved tokens for a KeyScan, got {facts.moved}")
        rows = HeldRows.checked(tensors, facts.torch_dtype(), "rows.")
        if rows.scale is not None and rules.leaves != "int8":
            raise ValueError("expected keys as they came, got some in int8")
        if rows.count != count:
            raise ValueError(f"expected the keys of {count} tokens, got {rows.count}")
        key, value = rows.read(0, count)
        sizes = (0.0, *largest_entries(key, value))
        large = needs_rescaling(sizes, 1.0, key.shape[3], working_dtype(key.dtype))
        memory = replace(Coded.begin(rules, key.to(rows.dtype), value.to(rows.dtype)), is_large=large)
        memory = memory._converted() if rows.scale is not None else memory
        memory.rows.join(rows)
        return memory

    def _converted(self) -> Coded:
        """The memory with all rows in their final form."""
        if self.later is None:
            return self
        self.later.join(self.rows)
        return replace(self, rows=self.later, later=None)

    def _extend(self, query: Tensor, key: Tensor, value: Tensor, scale: float, by_plan: bool) -> tuple[Coded, Tensor]:
        memory = self._converted() if by_plan else self
        memory.rows.append(key, value)
        if not by_plan:
            return memory, exact.attend(memory._inputs(query, scale), self.rules.plan.weights)
        if memory.is_large:
            return memory, attend(memory._inputs(query, scale), self.rules.plan.never_exact())
        memory._finish_blocks()
        if query.shape[2] > 1:
            return memory, dispatch.attend(memory._problem(query, scale))
        step, place = self.step, memory.rows.count - 1
        if step is None or not step.serves(memory, query, scale, place // BLOCK):
            problem = memory._problem(query, scale)
            if native.unsupported(problem) is not None:
                return replace(memory, step=None), dispatch.attend(problem)
            step = _Step(query.shape, scale, place // BLOCK, memory._held, ScanCall(problem))
        return replace(memory, step=step), step.call.attend(query, place + 1, place)

    @property
    def _held(self) -> tuple[Tensor, ...]:
        return tuple(buffer.storage for buffer in self.buffers)

    def _inputs(self, query: Tensor, scale: float) -> Inputs:
        key, value = (rows.to(query.dtype) for rows in self.rows.read(0, self.rows.count))
        offset = key.shape[2] - query.shape[2]
        return Inputs(query, key, value, scale, is_causal=True, offset=offset, needs_rescaling=self.is_large)

    def _problem(self, query: Tensor, scale: float) -> Problem:
        key, value, scales = self.rows.key.rows, self.rows.value.rows, self.rows.scale
        inputs = Inputs(query, key, value, scale, is_causal=True, offset=key.shape[2] - query.shape[2])
        codes = Codes(self.codes.rows.unflatten(3, (-1, 16)), self.sigma.rows.flatten(2))
        plan, rest = self.rules.plan, self.rules.plan.rest
        scanned = Scanned(inputs, codes, plan.scanned, None if scales is None else scales.rows)
        stand_ins = rest.of_totals(inputs, self.sums.rows, None) if isinstance(rest, BlockMeans) else None
        return Problem(inputs, Graph(inputs, scan=scanned), stand_ins, plan.weights)

    def _finish_blocks(self) -> None:
        """Code and sum the blocks that have become complete."""
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
class _Step:
    """The kernel call of the last token, for all tokens of its block, which see the same codes and sums, while the
    buffers stay the same.
    """

    shape: torch.Size
    scale: float
    block: int
    held: tuple[Tensor, ...]
    call: ScanCall

    def serves(self, memory: Coded, query: Tensor, scale: float, block: int) -> bool:
        is_same = (self.shape, self.scale, self.block) == (query.shape, scale, block)
        return is_same and all(tensor is latest for tensor, latest in zip(self.held, memory._held, strict=True))

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        """None: a copy of the memory has other buffers."""
        return type(None), ()


def _one_token(plan: Plan, inputs: Inputs) -> tuple[Callable[[], object], Callable[[], object]]:
    """Two functions that add a token after those of the inputs: one attends exactly, one by the plan."""
    x = inputs
    token = (x.query, x.key[:, :, -1:], x.value[:, :, -1:], x.scale)

    def added(by_plan: bool) -> Callable[[], object]:
        memory = replace(Coded.begin(Rules(plan.never_exact(), "model", 0), x.key, x.value), exact_until=0)
        memory.rows.append(x.key, x.value)

        def add() -> Tensor:
            nonlocal memory
            output = memory.answer(*token)  # as streams do
            if output is None:
                memory, output = memory._extend(*token, by_plan=by_plan)
            return output

        return add

    return added(False), added(True)
