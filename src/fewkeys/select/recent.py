"""Blocks of positions around the query."""

from dataclasses import dataclass

import torch

from fewkeys.core.graph import Columns, Graph
from fewkeys.core.inputs import Inputs
from fewkeys.core.validation import check_count
from fewkeys.core.work import Work
from fewkeys.select.base import Recent, Remembered, Selector


@dataclass(frozen=True)
class RecentBlocks(Selector):
    """Keys of the query's own block of `size` positions and of `blocks - 1` before it (not causal, also after it).

    Blocks are of absolute positions, 0 .. size - 1 the first: they leave the window at once, as `rest=RunningMeans` and
    streams need. Under causality a query keeps `(blocks - 1/2) size` keys on average. `size` is a power of two, so that
    lists of different sizes can be united. Cost O(n size blocks).
    """

    size: int
    blocks: int = 2

    causal = True

    def __post_init__(self) -> None:
        check_count("RecentBlocks size", self.size)
        check_count("RecentBlocks blocks", self.blocks)
        if self.size & (self.size - 1):
            low = 1 << (self.size.bit_length() - 1)
            raise ValueError(f"RecentBlocks size: expected a power of two, got {self.size}; take {low} or {2 * low}")

    def select(self, inputs: Inputs) -> Graph:
        x, device = inputs, inputs.key.device
        first, last = x.offset // self.size, (x.offset + x.queries - 1) // self.size
        start = (torch.arange(first, last + 1, device=device) - self.blocks + 1) * self.size
        index = start[:, None] + torch.arange(self._listed(x), device=device)
        used, index = (index >= 0) & (index < x.keys), index.clamp(0, x.keys - 1)
        if x.valid is not None:
            used = used & x.valid[:, None, index]
        index, used = (rows.expand(x.batch, x.kv_heads, -1, -1) for rows in (index, used))
        return Graph(x, columns=Columns(index, used, self.size))

    def covers(self, inputs: Inputs) -> bool:
        return (self.blocks - 1) * self.size >= max(inputs.keys, inputs.queries + inputs.offset) - 1

    def _listed(self, inputs: Inputs) -> int:
        return self.size * (self.blocks if inputs.is_causal else 2 * self.blocks - 1)

    def work(self, inputs: Inputs) -> Work:
        return Work(float(self._listed(inputs)))

    @property
    def remembered(self) -> Remembered:
        return Remembered(recent=Recent(self.size, self.blocks))
