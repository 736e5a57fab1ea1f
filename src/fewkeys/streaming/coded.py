"""Memory of every token, with codes of the keys that each query scans: all is held, little is read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from fewkeys.core.buffer import Buffer
from fewkeys.core.graph import Graph
from fewkeys.core.inputs import Inputs
from fewkeys.core.precision import working
from fewkeys.core.records import build
from fewkeys.core.tensor_files import Form, check
from fewkeys.execute.problem import Problem
from fewkeys.plan import Plan
from fewkeys.rest import BlockMeans
from fewkeys.rest.block_means import block_sums
from fewkeys.select.key_scan import Scanned, codes_of
from fewkeys.sketch.codes import BLOCK, Codes, Frame, encode
from fewkeys.streaming.restored import NoFacts, check_rows

LEAST = 8
"""Blocks that there is room for at first."""


class Coded:
    """What sequences leave under `KeyScan` (`fewkeys.streaming.padded.Memory`).

    Of every finished block of 32 keys: codes, and the sums of keys and values up to its end. A block is coded once;
    tokens are taken back by forgetting the last ones.
    """

    _key: Buffer
    _value: Buffer
    _blocks: tuple[Buffer, Buffer, Buffer]
    """By block: codes, sigma, and sums over all keys and values up to the block's end, after a row of zeros."""

    def __init__(self, plan: Plan) -> None:
        held = [part.remembered for part in plan.parts]
        if len(held) != 1 or held[0] is None or not held[0].scan:
            raise ValueError(f"plan: a stream keeps KeyScan alone, without rules beside it, got {plan.keep}")
        self.plan, self.count = plan, held[0].scan

    @staticmethod
    def suits(plan: object) -> bool:
        """Whether some part of a plan asks for codes of all keys."""
        parts = plan.parts if isinstance(plan, Plan) and plan.keep is not None else ()
        return any(part.remembered is not None and part.remembered.scan for part in parts)

    def begin(self, key: Tensor, value: Tensor) -> Coded:
        found, first = Coded(self.plan), working(key[:, :, :0])
        found._key, found._value = (Buffer.of(rows[:, :, :0]) for rows in (key, value))
        codes = encode(first, Frame.of(first))
        zero = first.new_zeros((*first.shape[:2], 1, key.shape[3] + value.shape[3]), dtype=torch.float64)
        rows = (codes.packed.flatten(3), codes.sigma.unflatten(2, (-1, BLOCK)), zero)
        found._blocks = tuple(Buffer(part, part.shape[2], LEAST) for part in rows)  # type: ignore[assignment]
        return found

    def make_room(self, count: int) -> None:
        """There always is."""

    def take(self, query: Tensor | None, key: Tensor, value: Tensor, scale: float) -> Iterator[Problem]:
        self._key.append(key)
        self._value.append(value)
        self._finish_blocks()
        if query is not None:
            yield self._problem(query, scale)

    def select(self, index: Tensor) -> Coded:
        found = Coded(self.plan)
        found._key, found._value = self._key.select(index), self._value.select(index)
        found._blocks = tuple(part.select(index) for part in self._blocks)  # type: ignore[assignment]
        return found

    def refusal(self, count: int) -> str | None:
        return None

    def crop(self, count: int) -> None:
        self._key.count = self._value.count = count
        codes, sigma, sums = self._blocks
        codes.count = sigma.count = count // BLOCK
        sums.count = count // BLOCK + 1

    def merge(self, other: Coded) -> None:
        for _ in self.take(None, other._key.rows, other._value.rows, 1.0):
            pass

    def like(self) -> tuple[Tensor, Tensor]:
        return self._key.held, self._value.held

    def bytes(self) -> int:
        return sum(part.held.numel() * part.held.itemsize for part in (self._key, self._value, *self._blocks))

    def tensors(self) -> dict[str, Tensor]:
        return {"key": self._key.rows, "value": self._value.rows}

    def facts(self) -> dict[str, Any]:
        return {}

    def restored(self, count: int, facts: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Coded:
        build(NoFacts, facts)
        key, value = check_rows(tensors, "")
        check(tensors, {name: Form(tuple(rows.shape), key.dtype) for name, rows in (("key", key), ("value", value))})
        if key.shape[2] != count:
            raise ValueError(f"expected the keys of {count} tokens, got {key.shape[2]}")
        found = self.begin(key, value)
        for _ in found.take(None, key, value, 1.0):
            pass
        return found

    def _finish_blocks(self) -> None:
        """Codes and sums of the blocks that are finished and have none yet."""
        codes, sigma, sums = self._blocks
        start, stop = codes.count * BLOCK, self._key.count // BLOCK * BLOCK
        if start == stop:
            return
        key, value = self._key.rows[:, :, start:stop], self._value.rows[:, :, start:stop]
        found = codes_of(key, Frame.of(self._key.rows), "auto")
        codes.append(found.packed.flatten(3))
        sigma.append(found.sigma.unflatten(2, (-1, BLOCK)))
        new = torch.cat([block_sums(key), block_sums(value)], -1)
        sums.append(sums.rows[:, :, -1:] + new.cumsum(2))

    def _problem(self, query: Tensor, scale: float) -> Problem:
        key, value = self._key.rows, self._value.rows
        inputs = Inputs(query, key, value, scale, is_causal=True, offset=key.shape[2] - query.shape[2])
        packed, sigma, sums = (part.rows for part in self._blocks)
        codes = Codes(packed.unflatten(-1, (-1, 16)), sigma.flatten(2))
        graph = Graph(inputs, descent=Scanned(inputs, codes, self.count))
        rest, stand_ins = self.plan.rest, None
        if isinstance(rest, BlockMeans):
            stand_ins = rest.of_totals(inputs, sums, None)
        return Problem(inputs, graph, stand_ins, self.plan.weights)
