"""Blocks: a window, random ones, and global ones."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from experiments.sparsefinder.baselines.draws import distinct
from torch import Tensor

from fewkeys.core.graph import Columns, Graph
from fewkeys.core.inputs import Inputs
from fewkeys.core.validation import check_count
from fewkeys.core.work import Work
from fewkeys.papers.sparsefinder.patterns import GlobalTokens
from fewkeys.select.base import Selector
from fewkeys.select.recent import RecentBlocks


@dataclass(frozen=True)
class BigBird(Selector, listed=True):
    """Blocks of `size` positions: every query block sees a window of blocks, `random` others, and the global ones.

    The window is `window` blocks, an odd number with the query's block in the middle; under causality that block and
    the `window // 2` before it. `random` blocks are drawn without replacement for every query block, sequence and key
    head from those that are neither in the window nor global nor all future. The first `global_blocks * size` real
    tokens see all tokens and all tokens see them (the paper's internal construction, ITC). With size 1 all counts are
    tokens. `size` is a power of two, as for `RecentBlocks`. Draws come from the call's generator. Defaults are the
    paper's, for size 64.

    Cost O(n size (window + random + global_blocks)).

    Source: Zaheer et al., Big Bird (arXiv 2007.14062), section 2 and appendix D.
    """

    size: int
    window: int = 3
    random: int = 3
    global_blocks: int = 2

    causal = True

    def __post_init__(self) -> None:
        RecentBlocks(check_count("BigBird size", self.size))
        check_count("BigBird window", self.window)
        if self.window % 2 == 0:
            raise ValueError(f"BigBird window: expected an odd number of blocks, got {self.window}; add one")
        check_count("BigBird random", self.random, least=0)
        check_count("BigBird global_blocks", self.global_blocks, least=0)

    @property
    def _near(self) -> RecentBlocks:
        return RecentBlocks(self.size, (self.window + 1) // 2)

    def select(self, inputs: Inputs) -> Graph:
        graph = self._near.select(inputs)
        if self.global_blocks:
            graph = graph | GlobalTokens(self.global_blocks * self.size).select(inputs)
        if self.random:
            graph = graph | Graph(inputs, columns=self._drawn(inputs))
        return graph

    def _drawn(self, x: Inputs) -> Columns:
        device, size, reach = x.key.device, self.size, self.window // 2
        query_block = torch.arange(x.offset // size, (x.offset + x.queries - 1) // size + 1, device=device)
        stop = _key_blocks(x, size)  # (B, 1, 1), one past the last
        first = self.global_blocks
        low = (query_block - reach).clamp_min(first).minimum(stop)
        if x.is_causal:
            high, stop = low, low
        else:
            high = (query_block + reach + 1).minimum(stop).maximum(low)
        # Candidates are first .. low - 1 and high .. stop - 1, in this order.
        total = (low - first).clamp_min(0) + (stop - high).clamp_min(0)
        rank = distinct(x, total, query_block.numel(), self.random)
        block = rank + first
        block = torch.where(block >= low.unsqueeze(-1), block + (high - low).unsqueeze(-1), block)
        used = (rank >= 0).unsqueeze(-1).expand(-1, -1, -1, -1, size).flatten(3)
        index = (block.unsqueeze(-1) * size + torch.arange(size, device=device)).flatten(3)
        used = used & (index < x.keys)
        index = index.masked_fill(~used, 0)
        if x.valid is not None:
            real = x.valid[:, None].expand(-1, x.kv_heads, -1)
            used = used & real.gather(-1, index.flatten(2)).view_as(index)
        return Columns(index, used, size)

    def covers(self, inputs: Inputs) -> bool:
        return self._near.covers(inputs) or self.global_blocks * self.size >= inputs.keys

    def work(self, inputs: Inputs) -> Work:
        globals_ = 0.0
        if self.global_blocks:
            globals_ = GlobalTokens(self.global_blocks * self.size).work(inputs).scores
        near = self.window // 2 + 1 if inputs.is_causal else self.window
        return Work(self.size * (near + self.random) + globals_)


def _key_blocks(x: Inputs, size: int) -> Tensor:
    """The number of blocks up to the last real key, (B, 1, 1)."""
    last = torch.full((x.batch,), x.keys, device=x.key.device)
    if x.valid is not None:
        last = (x.valid * torch.arange(1, x.keys + 1, device=x.key.device)).amax(-1)
    return ((last + size - 1) // size)[:, None, None]
