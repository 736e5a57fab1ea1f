"""Means of what a query scanned and did not keep."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from fewkeys.core.graph import Graph
from fewkeys.core.inputs import Inputs
from fewkeys.core.precision import working
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
        blocks = -(-x.keys // BLOCK)
        totals = [_sums(working(part), blocks) for part in (x.key, x.value)]
        return self.of_totals(x, totals[0], totals[1], _sums(_real(x), blocks))

    def of_totals(self, inputs: Inputs, key: Tensor, value: Tensor, size: Tensor) -> RangeStandIns:
        """The ranges of queries from the sums, float64, over the keys (B, Hkv, blocks + 1, D), values and numbers of
        real keys (B, blocks + 1) before each block, and before the end.
        """
        x = inputs
        edges = torch.tensor(self._edges(x), device=x.key.device).clamp_max(key.shape[2] - 1)
        start, stop = edges[:, :-1], edges[:, 1:]
        size = size[:, stop] - size[:, start]
        rows = []
        for total in (key, value):
            # Differences of sums over all that came before: float64 leaves of them what float32 could not.
            mean = (total[:, :, stop] - total[:, :, start]) / size.clamp_min(1)[:, None, :, :, None]
            rows.append(mean.to(working(x.query[:0]).dtype))
        return RangeStandIns(rows[0], rows[1], size.to(rows[0].dtype), (edges * BLOCK).clamp_max(x.keys))

    def _edges(self, x: Inputs) -> list[list[int]]:
        """(steps, count + 1): where the ranges of each step begin, and the last one ends, in blocks."""
        if not x.is_causal:
            blocks = -(-x.keys // BLOCK)
            return [[c * blocks // self.count for c in range(self.count + 1)]]
        first, last = x.offset // BLOCK, (x.offset + x.queries - 1) // BLOCK
        return [self._ranges(s) for s in range(first, last + 1)]

    def _ranges(self, s: int) -> list[int]:
        ages = [min(s, max(c, int(s ** (c / self.count) + 1e-9))) for c in range(1, self.count)]
        return [s - age for age in (s, *reversed(ages), 0)]


def _sums(rows: Tensor, blocks: int) -> Tensor:
    """(..., blocks + 1, X), float64: sums over the rows (..., N, X), or (..., N), before each block."""
    if rows.ndim == 2:
        return _sums(rows.unsqueeze(-1), blocks).squeeze(-1)
    by_block = block_sums(pad(rows, (0, 0, 0, blocks * BLOCK - rows.shape[-2])))
    return pad(by_block.cumsum(-2), (0, 0, 1, 0))


def block_sums(rows: Tensor) -> Tensor:
    """The sums (..., N / 32, X), float64, of blocks of rows (..., N, X)."""
    found: Tensor = rows.double().unflatten(-2, (-1, BLOCK)).sum(-2)
    return found


def _real(inputs: Inputs) -> Tensor:
    """(B, Nk): ones for real keys."""
    x = inputs
    return x.key.new_ones((x.batch, x.keys)) if x.valid is None else x.valid.to(x.key.dtype)
