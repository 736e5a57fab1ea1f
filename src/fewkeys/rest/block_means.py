"""Means of the keys that a query scanned but did not keep."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from fewkeys.core.graph import Graph
from fewkeys.core.inputs import Inputs
from fewkeys.core.precision import working_dtype
from fewkeys.core.validation import check_count
from fewkeys.core.weights import Weights
from fewkeys.core.work import Work
from fewkeys.rest.base import RangeStandIns, Rest
from fewkeys.select.base import Selector
from fewkeys.select.key_scan import Scanned
from fewkeys.sketch.codes import BLOCK


@dataclass(frozen=True)
class BlockMeans(Rest):
    """Beside `KeyScan`: at most `count` ranges of the past, each represented by its mean key and mean value.

    A query whose own block is the s-th (from 0) has the s blocks of 32 keys before it in ranges that begin

        a_c = max(c, floor(s^(c / count)))   c = 1 .. count

    blocks before its own: ranges grow with their distance, and as far as `count` reaches each is one block. A range
    weighs as many keys as the query did not keep of it, `size f(q . mean key)`; its means are those of all its keys.
    Without causality all queries have `count` ranges of equal length. Strictly causal.

    Slots: count. Cost O(n (D + Dv)) for the sums, O(n count / 32 (D + Dv)) for the means. Gradients flow through them.
    """

    count: int
    causal: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_count("BlockMeans count", self.count)

    def slots(self, head_dim: int, value_dim: int) -> float:
        return float(self.count)

    def work(self, inputs: Inputs, keep: Selector) -> Work:
        return Work(float(self.count), (1 + self.count / BLOCK) * (inputs.head_dim + inputs.value_dim))

    def check_beside(self, keep: Selector) -> None:
        if keep.remembered is None or not keep.remembered.scan:
            raise ValueError(f"keep: BlockMeans stands for what KeyScan(count) alone does not choose, got {keep}")

    def prepare(self, inputs: Inputs, graph: Graph, weights: Weights) -> RangeStandIns:
        x = inputs
        if not isinstance(graph.scan, Scanned):
            raise ValueError("rest: BlockMeans needs the graph of KeyScan, got another; use ClusterMeans or Drop()")
        totals = _sums(x.key, x.value)
        reals = None if x.valid is None else _sums(x.valid[:, None, :, None].float())[:, 0, :, 0]
        return self.of_totals(x, totals, reals)

    def of_totals(self, inputs: Inputs, totals: Tensor, reals: Tensor | None) -> RangeStandIns:
        """The ranges of queries from the sums that `RangeStandIns` asks for."""
        x = inputs
        edges = [[min(x.keys, BLOCK * edge) for edge in step] for step in self._edges(x)]
        dtype = working_dtype(x.query.dtype)
        return RangeStandIns(totals, reals, torch.tensor(edges, device=x.key.device), x.head_dim, dtype)

    def _edges(self, x: Inputs) -> list[list[int]]:
        """(steps, count + 1): where the ranges of each step begin, and the last one ends, in blocks."""
        if not x.is_causal:
            blocks = -(-x.keys // BLOCK)
            return [[c * blocks // self.count for c in range(self.count + 1)]]
        first, last = x.offset // BLOCK, (x.offset + x.queries - 1) // BLOCK
        return [_ranges(s, self.count) for s in range(first, last + 1)]


@lru_cache(4096)
def _ranges(s: int, count: int) -> list[int]:
    """Where the ranges of queries whose own block is the s-th begin, and the last one ends."""
    ages = [min(s, max(c, int(s ** (c / count) + 1e-9))) for c in range(1, count)]
    return [s - age for age in (s, *reversed(ages), 0)]


def _sums(*parts: Tensor) -> Tensor:
    """(B, H, G + 1, X + ..), float64: sums over rows (B, H, N, X), .. before each of G blocks, and before the end."""
    fill = -parts[0].shape[2] % BLOCK
    whole = [pad(rows, (0, 0, 0, fill)) if fill else rows for rows in parts]
    return pad(torch.cat([*map(block_sums, whole)], -1).cumsum(2), (0, 0, 1, 0))


def block_sums(rows: Tensor) -> Tensor:
    """The sums (..., N / 32, X), float64, of blocks of rows (..., N, X), each taken in float32 or better."""
    sums: Tensor = rows.unflatten(-2, (-1, BLOCK)).sum(-2, dtype=torch.promote_types(rows.dtype, torch.float32))
    return sums.double()
