"""RetroInfer: exact, estimated and dropped clusters of keys. Our implementation after the paper.

The first keys, the latest, and the keys of a query's best clusters are exact; further clusters are estimated by their
mean key and mean value; the others are dropped. Keys are clustered segment by segment, one cluster for `size` of them.
Each scored mean counts as a slot, unless `free`.

Source: Chen et al., "RetroInfer" (arXiv 2505.02922), section 4: the wave index.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from experiments.decoders.attend import Look
from experiments.peers.parts import averages, k_means
from torch import Tensor

SINKS = 4


@dataclass(frozen=True)
class RetroInfer:
    """`estimated`: the share of clusters that are exact or estimated."""

    slots: int
    free: bool = False
    size: int = 16
    segment: int = 64
    estimated: float = 0.5

    def __call__(self, query: Tensor, key: Tensor, value: Tensor) -> Iterator[Look]:
        generator = torch.Generator().manual_seed(0)
        cluster = torch.zeros(len(key), 0, dtype=torch.int64)
        for start in range(0, key.shape[1], self.segment):
            stop = min(start + self.segment, key.shape[1])
            now = query[:, :, start:stop]
            if stop <= self.slots:
                kept = torch.ones(*now.shape[:-1], stop, dtype=torch.bool)
                yield Look(start, stop, kept, torch.zeros(kept.shape[:-1], dtype=torch.int64))
            else:
                yield self._look(now, key[:, :start], value[:, :start], cluster, start)
            many = max(1, (stop - start) // self.size)
            fresh, _ = k_means(key[None, :, start:stop], many, 5, generator)
            cluster = torch.cat([cluster, fresh[0] + start // self.size], 1)

    def _look(self, query: Tensor, key: Tensor, value: Tensor, cluster: Tensor, start: int) -> Look:
        count = start // self.size
        (mean, size), (stand_in, _) = (averages(x[None], cluster[None], count) for x in (key, value))
        level = size.log()[0][:, None, None]
        score = query @ mean[0][:, None].mT + level
        used = (size[0] > 0).sum(-1)[:, None, None]
        tail = torch.arange(1, query.shape[2] + 1)
        room = self.slots - SINKS - tail - (0 if self.free else used)
        order = score.argsort(dim=-1, descending=True)
        sizes = size[0][:, None, None].expand(score.shape).gather(-1, order).cumsum(-1)
        fits = sizes <= room.unsqueeze(-1)
        fits[..., 0] = True
        opened = torch.zeros_like(fits).scatter(-1, order, fits)
        near = torch.zeros_like(fits).scatter(-1, order[..., : max(1, int(self.estimated * count))], True)
        kept = opened.gather(-1, cluster[:, None, None].expand(*opened.shape[:-1], -1))
        kept[..., :SINKS] = True
        kept = torch.nn.functional.pad(kept, (0, query.shape[2]), value=True)
        return Look(
            start, start + query.shape[2], kept, used.expand(query.shape[:-1]),
            score.masked_fill(opened | ~near, -torch.inf), stand_in[0],
        )  # fmt: skip
