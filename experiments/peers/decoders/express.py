"""Express: thinning along the sequence. Our implementation after the paper's idea.

Keys are sealed `size` at a time. Kernel halving thins two sets of the same level to one, in which each key represents
a pair. So the past is one set for every binary digit 1 of its number of seals, and keys of level l weigh 2^l. Keys not
sealed yet are exact, and so are the first ones, without which decoders fail. The
paper bounds memory by O(size); here it is O(size log n), of which half is used on average.

Source: Gong, Carrell, Dwivedi, Mackey, "Express Language Modeling" (arXiv 2606.10944); halving: `thinformer.py`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from experiments.decoders.attend import Look
from experiments.peers.thinformer import halve
from torch import Tensor


@dataclass(frozen=True)
class Express:
    """`size`: keys of a set, an even number."""

    size: int
    sinks: int = 4

    def __call__(self, query: Tensor, key: Tensor, value: Tensor) -> Iterator[Look]:
        generator = torch.Generator().manual_seed(0)
        sets: list[tuple[int, Tensor]] = []  # level, and places (Hkv, size), the oldest set first
        most = value.abs().amax((1, 2))[:, None, None, None]
        for start in (0, *range(self.sinks + self.size, key.shape[1], self.size)):
            stop = min(max(start, self.sinks) + self.size, key.shape[1])
            score = query[:, :, start:stop] @ key[:, None, :start].mT
            weight = torch.full((len(key), start), -torch.inf)
            for level, place in sets:
                weight.scatter_(1, place, level * math.log(2))
            kept = torch.zeros(*score.shape[:-1], stop, dtype=torch.bool)
            kept[..., start:] = True
            kept[..., : self.sinks] = True
            many = torch.full(score.shape[:-1], sum(place.shape[1] for _, place in sets))
            yield Look(start, stop, kept, many, score + weight[:, None, None], value[:, :start])
            if stop == key.shape[1]:
                return
            sets.append((0, torch.arange(max(start, self.sinks), stop).expand(len(key), -1)))
            while len(sets) > 1 and sets[-1][0] == sets[-2][0]:
                (level, first), (_, second) = sets[-2:]
                place = torch.cat([first, second], 1)
                both = [
                    x.gather(1, place.unsqueeze(-1).expand(-1, -1, x.shape[-1]))[:, None, None] for x in (key, value)
                ]
                left = halve(*both, key.shape[-1] ** -0.5, most.unsqueeze(-1), generator)[:, 0, 0]
                sets[-2:] = [(level + 1, place.gather(1, left))]
