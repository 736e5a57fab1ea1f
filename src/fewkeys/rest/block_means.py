"""Means of the keys that a query scanned but did not keep."""

from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from fewkeys.core.graph import Graph
from fewkeys.core.inputs import Inputs
from fewkeys.core.precision import working_dtype
from fewkeys.core.weights import Weights
from fewkeys.core.work import Work
from fewkeys.rest.base import CountedRest, RangeStandIns
from fewkeys.select.base import Selector
from fewkeys.sketch.codes import BLOCK


@dataclass(frozen=True)
class BlockMeans(CountedRest):
    """At most `count` ranges of the past, each represented by its mean key and mean value. Beside `KeyScan` alone.

    If a query's own block is the s-th (from 0), the s blocks of 32 keys before it are in ranges that begin

        a_c = max(c, floor(s^(c / count)))   c = 1 .. count

    blocks before its own: with s <= `count` each is one block. A range weighs `f(q . mean key)` times the number of its
    keys that the query did not keep; its means are those of all its keys. Without causality all queries have `count`
    ranges of equal length. Strictly causal.

    Slots: count. Cost O(n (1 + count / 32) (D + Dv)). Gradients flow through the means.
    """

    causal: ClassVar[bool] = True

    def work(self, inputs: Inputs, keep: Selector) -> Work:
        return Work(float(self.count), (1 + self.count / BLOCK) * (inputs.head_dim + inputs.value_dim))

    def check_beside(self, keep: Selector) -> None:
        if keep.remembered is None or not keep.remembered.scan:
            raise ValueError(f"keep: BlockMeans stands for what KeyScan(count) alone does not choose, got {keep}")

    def prepare(self, inputs: Inputs, graph: Graph, weights: Weights) -> RangeStandIns:
        valid = inputs.valid
        reals = None if valid is None else _sums(valid[:, None, :, None].float())[:, 0, :, 0]
        return self.of_totals(inputs, _sums(inputs.key, inputs.value), reals)

    def of_totals(self, inputs: Inputs, totals: Tensor, reals: Tensor | None) -> RangeStandIns:
        """The stand-ins with these first two fields of `RangeStandIns`."""
        x = inputs
        if x.is_causal:
            last = (x.offset + x.queries - 1) // BLOCK
            ranges = [_ranges(s, self.count) for s in range(x.offset // BLOCK, last + 1)]
        else:
            blocks = -(-x.keys // BLOCK)
            ranges = [[c * blocks // self.count for c in range(self.count + 1)]]
        edges = (BLOCK * torch.tensor(ranges, device=x.key.device)).clamp_max(x.keys)
        return RangeStandIns(totals, reals, edges, x.head_dim, working_dtype(x.query.dtype))


@lru_cache(4096)
def _ranges(s: int, count: int) -> list[int]:
    """Where ranges before the s-th block begin, and the last one ends, in blocks."""
    ages = [min(s, max(c, int(s ** (c / count) + 1e-9))) for c in range(1, count)]
    return [s - age for age in (s, *reversed(ages), 0)]


def _sums(*parts: Tensor) -> Tensor:
    """(B, H, G + 1, X + ..), float64: sums of rows (B, H, N, X), .. before each of G blocks, and of all."""
    fill = -parts[0].shape[2] % BLOCK
    sums = [block_sums(pad(rows, (0, 0, 0, fill)) if fill else rows) for rows in parts]
    return pad(torch.cat(sums, -1).cumsum(2), (0, 0, 1, 0))


def block_sums(rows: Tensor) -> Tensor:
    """(..., N / 32, X), float64: sums of blocks of rows (..., N, X), taken in float32 or better."""
    blocks = rows.unflatten(-2, (-1, BLOCK))
    return torch.sum(blocks, -2, dtype=torch.promote_types(rows.dtype, torch.float32)).double()
