"""Memory of every token, with codes of the keys. A query scans the codes and reads the few keys that it chooses.

The first tokens attend exactly, as many as `fewkeys.cost.decoding` says, and all later ones by the plan. Keys whose
squares may overflow are rescaled (`fewkeys.core.extent`) and coded again at every call, which may change the scale.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import ClassVar

import torch
from torch import Tensor

from fewkeys.core.fields import DERIVED, Buffer, Fields
from fewkeys.core.graph import Graph
from fewkeys.core.inputs import Inputs
from fewkeys.core.precision import autocast_is_on
from fewkeys.cost.decoding import exact_length
from fewkeys.execute import dispatch, exact, native
from fewkeys.execute.native.by_scan import ScanCall
from fewkeys.execute.problem import Problem
from fewkeys.flow import attend
from fewkeys.memory.checks import Kind
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
    """In int8 from the first answer of the plan on, as they came until then."""
    codes: Buffer = field(metadata=DERIVED)
    sigma: Buffer = field(metadata=DERIVED)
    sums: Buffer = field(metadata=DERIVED)
    is_large: bool = False
    exact_until: int | None = None
    """The number of first tokens that attend exactly; None before the first query."""
    step: _Step | None = None

    fewest: ClassVar[int] = 0
    """The smallest number of tokens, beside 0, that `crop` can leave."""

    @staticmethod
    def begin(rules: Rules, kind: Kind) -> Coded:
        """Memory without tokens."""
        key, value = kind.no_tokens()
        rows = HeldRows.empty("model" if rules.plan.exact_if_faster else rules.leaves, key, value)
        heads, bytes_of_block = key.shape[:2], width(kind.dim) * BLOCK // 4
        blocks = (
            key.new_empty((*heads, 0, bytes_of_block), dtype=torch.uint8),
            key.new_empty((*heads, 0, BLOCK), dtype=torch.int16),
            key.new_zeros((*heads, 1, kind.dim + kind.value_dim), dtype=torch.float64),
        )
        packed, sigma, sums = (Buffer(part, part.shape[2], LEAST) for part in blocks)
        return Coded(rules, rows, packed, sigma, sums)

    @property
    def buffers(self) -> tuple[Buffer, ...]:
        """What `extend` changes in place."""
        return (*self.rows.buffers, self.codes, self.sigma, self.sums)

    def extend(
        self, query: Tensor | None, key: Tensor, value: Tensor, scale: float, is_large: bool
    ) -> tuple[Coded, Tensor | None]:
        """The memory with N more tokens, and the outputs of their queries (B, Hq, N, D), if any. `is_large`: squares of
        entries may overflow.
        """
        memory = replace(self, is_large=True, step=None) if is_large else self
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
        step, place = self.step, self.rows.count
        if step is None or not self._stores(query, key, value) or not step.serves(self, query, scale, place // BLOCK):
            return None
        try:
            output = step.call.attend(query, place + 1, place, (key, value))
        except LargeError:
            return None
        for buffer in self.rows.buffers:
            buffer.count = place + 1
        return output

    def _stores(self, query: Tensor, key: Tensor, value: Tensor) -> bool:
        """Whether a kernel can store this token: there is room, and its rows are like the others."""
        tokens, rows = (query, key, value), self.rows
        if not placed(*tokens) or autocast_is_on() or any(x.is_neg() or x.dtype != rows.dtype for x in tokens):
            return False
        return (
            all(rows.count < buffer.storage.shape[2] for buffer in rows.buffers)
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

    def filled(self, count: int, tensors: Mapping[str, Tensor]) -> Coded:
        """This empty memory with `count` tokens of a file; `ValueError` unless they are memory of such a plan."""
        memory = self._converted() if "rows.scale" in tensors else self
        return replace(memory, rows=memory.rows.filled(count, tensors, "rows"))

    def _converted(self) -> Coded:
        """The memory with all rows in their final form."""
        if self.rules.leaves == "model" or self.rows.scale is not None:
            return self
        key, value = self.rows.read(0, self.rows.count)
        rows = HeldRows.empty("int8", key, value)
        rows.append(key, value)
        return replace(self, rows=rows)

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
        rules = Rules(plan.never_exact(), "model", 0)
        memory = replace(Coded.begin(rules, Kind.of(x.key, x.value)), exact_until=0)
        memory.rows.append(x.key, x.value)

        def add() -> Tensor:
            nonlocal memory
            output = memory.answer(*token)  # as streams do
            if output is None:
                memory, output = memory._extend(*token, by_plan=by_plan)
            return output

        return add

    return added(False), added(True)
