"""Memory of every token, with codes of the keys that each query scans: all is held, little is read.

    open      the first tokens, as long as exact attention is faster: keys and values as they come
    closed    all tokens: keys and values as they are to be held, and codes and sums of every finished block of 32 keys

Tokens before `exact_length` are answered exactly, whatever comes later, and all others by the plan: so a token's answer
does not depend on the pieces that tokens come in. Numbers so large that codes need other units
(`fewkeys.core.extent`), which later ones may change, are coded again at every call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fewkeys.core.buffer import Buffer
from fewkeys.core.graph import Graph
from fewkeys.core.inputs import Inputs
from fewkeys.core.precision import working
from fewkeys.core.records import build
from fewkeys.core.validation import FLOATS
from fewkeys.cost.decoding import exact_length
from fewkeys.execute import dispatch, exact
from fewkeys.execute.problem import Problem
from fewkeys.flow import attend
from fewkeys.plan import Plan
from fewkeys.rest import BlockMeans
from fewkeys.rest.block_means import block_sums
from fewkeys.select.key_scan import Scanned, codes_of
from fewkeys.sketch.codes import BLOCK, Codes, Frame, encode
from fewkeys.streaming.checks import are_large
from fewkeys.streaming.rows import Held, HeldRows

LEAST = 8
"""Blocks that there is room for at first."""
OPEN = Held()


@dataclass(frozen=True)
class _Facts:
    """What the header of a file says: the dtype of the model's keys and values."""

    dtype: str


class Coded:
    """What sequences leave under `KeyScan` (`fewkeys.streaming.padded.Memory`).

    A block is coded once, from keys as they are held; tokens are taken back by forgetting the last ones.
    """

    _rows: HeldRows
    _closed: HeldRows | None
    """Where rows go once exact attention is slower; None: they are there."""
    _blocks: dict[str, Buffer]
    """By block: codes, sigma, and sums over all keys and values up to the block's end, after a row of zeros."""

    def __init__(self, plan: Plan, how: Held) -> None:
        if len(plan.parts) != 1 or not plan.scanned:
            raise ValueError(f"plan: a stream keeps KeyScan alone, without rules beside it, got {plan.keep}")
        self.plan, self.how, self.count = plan, how, plan.scanned
        self._large = False

    @staticmethod
    def suits(plan: object) -> bool:
        """Whether some part of a plan asks for codes of all keys."""
        return isinstance(plan, Plan) and plan.scanned > 0

    def begin(self, key: Tensor, value: Tensor) -> Coded:
        closed = HeldRows.empty(self.how, key, value)
        if self.plan.exact_if_faster and self.how != OPEN:
            return self._of(HeldRows.empty(OPEN, key, value), closed, _no_blocks(key, value))
        return self._of(closed, None, _no_blocks(key, value))

    def make_room(self, query: Tensor | None, key: Tensor, value: Tensor) -> None:
        total = self._rows.count + key.shape[2]
        if self._closed is None:
            self._rows.make_room(total)
        elif query is not None and total > exact_length(self.plan, query, key, value, _one_token):
            self._closed.make_room(total)

    def take(self, query: Tensor | None, key: Tensor, value: Tensor, scale: float) -> Iterator[Tensor | Problem]:
        self._large = self._large or are_large(query, key, value, scale)
        if query is None:
            self._rows.append(key, value)
            return
        count = key.shape[2]
        first = min(count, max(0, exact_length(self.plan, query, key, value, _one_token) - self._rows.count))
        for part in (slice(0, first), slice(first, count)):
            if part.start < part.stop:
                by_plan = part.start == first
                if by_plan:
                    self._close()
                self._rows.append(key[:, :, part], value[:, :, part])
                by_codes = self._anew if self._large else self._problem
                yield (by_codes if by_plan else self._exact)(query[:, :, part], scale)

    def select(self, index: Tensor) -> Coded:
        closed = None if self._closed is None else self._closed.select(index)
        blocks = {name: part.select(index) for name, part in self._blocks.items()}
        return self._of(self._rows.select(index), closed, blocks)

    def refusal(self, count: int) -> str | None:
        return None

    def crop(self, count: int) -> None:
        for part in self._rows:
            part.count = count
        for name, part in self._blocks.items():
            part.count = min(part.count, count // BLOCK + (name == "sums"))

    def merge(self, other: Coded) -> None:
        self._large = self._large or other._large
        if other._closed is None and self._closed is not None:
            self._close()
        self._rows.join(other._rows)

    def like(self) -> tuple[Tensor, Tensor]:
        return self._rows.like

    def bytes(self) -> int:
        return sum(part.bytes() for part in (*self._rows, *(self._closed or ()), *self._blocks.values()))

    def tensors(self) -> dict[str, Tensor]:
        return self._rows.tensors()

    def facts(self) -> dict[str, Any]:
        return {"dtype": str(self._rows.dtype)}

    def restored(self, count: int, facts: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Coded:
        kind = {str(dtype): dtype for dtype in FLOATS}.get(build(_Facts, facts).dtype)
        if kind is None:
            raise ValueError(f"expected a dtype of floating-point numbers, got {facts['dtype']}")
        if "scale" in tensors and self.how.dtype != "int8":
            raise ValueError("expected keys as they came, got some in int8")
        rows = HeldRows.checked(tensors, kind)
        if rows.count != count:
            raise ValueError(f"expected the keys of {count} tokens, got {rows.count}")
        memory = self.begin(*rows.like)
        memory._large = are_large(None, *rows.read(0, count), 1.0)
        if memory._closed is not None and "scale" in tensors:
            memory._rows, memory._closed = memory._closed, None
        memory._rows.join(rows)
        return memory

    def _of(self, rows: HeldRows, closed: HeldRows | None, blocks: dict[str, Buffer]) -> Coded:
        memory = Coded(self.plan, self.how)
        memory._rows, memory._closed, memory._blocks, memory._large = rows, closed, blocks, self._large
        return memory

    def _close(self) -> None:
        """Hold what came so far as it is to be held."""
        if self._closed is not None:
            self._closed.join(self._rows)
            self._rows, self._closed = self._closed, None

    def _finish_blocks(self) -> None:
        """Codes and sums of the blocks that are finished and have none yet."""
        codes, sigma, sums = self._blocks.values()
        start, stop = codes.count * BLOCK, self._rows.count // BLOCK * BLOCK
        if start == stop:
            return
        key, value = self._rows.read(start, stop)
        coded = codes_of(key, Frame.of(self._rows.read(0, BLOCK)[0]), "auto")
        codes.append(coded.packed.flatten(3))
        sigma.append(coded.sigma.unflatten(2, (-1, BLOCK)))
        new = torch.cat([block_sums(key), block_sums(value)], -1)
        sums.append(sums.rows[:, :, -1:] + new.cumsum(2))

    def _exact(self, query: Tensor, scale: float) -> Tensor:
        return exact.attend(self._inputs(query, scale), self.plan.weights)

    def _inputs(self, query: Tensor, scale: float) -> Inputs:
        key, value = (rows.to(query.dtype) for rows in self._rows.read(0, self._rows.count))
        offset = key.shape[2] - query.shape[2]
        return Inputs(query, key, value, scale, is_causal=True, offset=offset, needs_rescaling=self._large)

    def _anew(self, query: Tensor, scale: float) -> Tensor:
        return attend(self._inputs(query, scale), self.plan.never_exact())

    def _problem(self, query: Tensor, scale: float) -> Problem:
        self._finish_blocks()
        key, value = self._rows.key, self._rows.value
        inputs = Inputs(query, key, value, scale, is_causal=True, offset=key.shape[2] - query.shape[2])
        packed, sigma, sums = (part.rows for part in self._blocks.values())
        codes = Codes(packed.unflatten(-1, (-1, 16)), sigma.flatten(2))
        scanned = Scanned(inputs, codes, self.count, self._rows.scale)
        rest = self.plan.rest
        stand_ins = rest.of_totals(inputs, sums, None) if isinstance(rest, BlockMeans) else None
        return Problem(inputs, Graph(inputs, scan=scanned), stand_ins, self.plan.weights)


def _no_blocks(key: Tensor, value: Tensor) -> dict[str, Buffer]:
    first = working(key[:, :, :0])
    codes = encode(first, Frame.of(first))
    zero = first.new_zeros((*first.shape[:2], 1, key.shape[3] + value.shape[3]), dtype=torch.float64)
    rows = {"packed": codes.packed.flatten(3), "sigma": codes.sigma.unflatten(2, (-1, BLOCK)), "sums": zero}
    return {name: Buffer(part, part.shape[2], LEAST) for name, part in rows.items()}


def _one_token(plan: Plan, inputs: Inputs) -> tuple[Callable[[], object], Callable[[], object]]:
    """What takes one token more, answered exactly and by the plan, after those of the inputs."""
    x, memories = inputs, []
    for _ in range(2):
        memories.append(Coded(plan.never_exact(), OPEN).begin(x.key, x.value))
        memories[-1]._rows.append(x.key, x.value)
    key, value = x.key[:, :, -1:], x.value[:, :, -1:]

    def exactly() -> Tensor:
        memories[0]._rows.append(key, value)
        return memories[0]._exact(x.query, x.scale)

    def by_plan() -> Tensor:
        memories[1]._rows.append(key, value)
        return dispatch.attend(memories[1]._problem(x.query, x.scale))

    return exactly, by_plan
