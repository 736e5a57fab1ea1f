"""The bias of distances (`DistanceBias`) of a chunk's scores, and of its stand-ins, in linear time."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from fewkeys.core.distances import DistanceBias, logarithm
from fewkeys.core.inputs import Inputs
from fewkeys.execute.torch.sources import Chunk


class Distances:
    """Of all heads; `size`: the queries of a block, `band`: the distances at which queries keep every key."""

    def __init__(self, inputs: Inputs, bias: DistanceBias, size: int, band: tuple[int, int] | None) -> None:
        x = inputs
        reaching = bias.reaching(0 if band is None else max(band), max(x.keys, x.queries + x.offset))
        self.reach, self.size, self.keys = reaching.reach, size, x.keys
        self.table = reaching.table.unflatten(0, (x.kv_heads, x.gqa_ratio)).repeat(x.batch, 1, 1)
        self.largest = reaching.largest.unflatten(0, (x.kv_heads, x.gqa_ratio)).repeat(x.batch, 1)
        self.band = band

    def of(self, place: Tensor, chunk: Chunk) -> Tensor:
        """(H, M, width), for columns whose keys are at `place` (H or 1, blocks or 1, width)."""
        table = self.table[chunk.heads]
        query = torch.arange(chunk.blocks * chunk.size, device=place.device).view(chunk.blocks, chunk.size, 1)
        distance = place.unsqueeze(2) - (query + chunk.first_key)
        index = (distance.clamp(-self.reach, self.reach) + self.reach).flatten(1).unsqueeze(1)
        biases = table.gather(-1, index.expand(*table.shape[:2], -1))
        by_query: Tensor = biases.unflatten(-1, distance.shape[1:]).transpose(1, 2).flatten(1, 3)
        return by_query

    def of_stand_ins(self, member: Tensor, chunk: Chunk) -> Tensor:
        """(H, M, C): log of the mass that each stand-in has for each query, the bias of all keys included.

        member (H, Nk, C): what each key counts for. A block of queries meets the keys within `reach` by one small
        matrix, the same for all blocks; keys before and after have one bias each, and prefix sums give their total.
        """
        heads, members = chunk.heads, member[chunk.heads]
        weight = (self.table[heads] - self.largest[heads].unsqueeze(-1)).exp()
        width, device = self.size + 2 * self.reach, member.device
        step = torch.arange(width, device=device) - self.reach - torch.arange(self.size, device=device)[:, None]
        near = weight[:, :, step.clamp(-self.reach, self.reach) + self.reach]
        first = chunk.first_key - self.reach
        last = first + (chunk.blocks - 1) * self.size + width
        if self.band is not None:
            near = near.masked_fill((step >= -self.band[0]) & (step <= self.band[1]), 0.0)
        rows = members[:, max(0, first) : max(0, min(self.keys, last))]
        before = min(max(0, -first), last - first)
        rows = pad(rows, (0, 0, before, last - first - before - rows.shape[1]))
        stretch = rows.unfold(1, width, self.size).mT  # (H, blocks, width, C)
        mass = near.unsqueeze(1) @ stretch.unsqueeze(2)  # (H, blocks, ratio, size, C)
        sums = pad(members.cumsum(1), (0, 0, 1, 0))
        starts = first + torch.arange(chunk.blocks, device=device) * self.size
        ahead = sums[:, starts.clamp(0, self.keys)]
        behind = sums[:, -1:] - sums[:, (starts + width).clamp(0, self.keys)]
        for end, beyond in ((weight[..., 0], ahead), (weight[..., -1], behind.clamp_min(0.0))):
            mass = mass + end[:, None, :, None, None] * beyond[:, :, None, None, :]
        largest = self.largest[heads][:, None, :, None, None]
        log_mass: Tensor = (logarithm(mass) + largest).flatten(1, 3)
        return log_mass
