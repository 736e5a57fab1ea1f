"""The `DistanceBias` of a chunk's scores and stand-ins, in linear time."""

import torch
from torch import Tensor
from torch.nn.functional import pad

from fewkeys.core.distances import DistanceBias, logarithm
from fewkeys.core.inputs import Inputs
from fewkeys.core.rows import stretch
from fewkeys.execute.torch.sources import Chunk


class Distances:
    """The bias of all heads; `size`: the queries of a block, `band`: the distances at which queries keep every key."""

    def __init__(self, inputs: Inputs, bias: DistanceBias, size: int, band: tuple[int, int] | None) -> None:
        x = inputs
        self.bias = bias.reaching(0 if band is None else max(band), max(x.keys, x.queries + x.offset))
        self.reach, self.size, self.keys, self.band = self.bias.reach, size, x.keys, band
        heads = torch.arange(x.query_heads, device=bias.table.device).view(x.kv_heads, x.gqa_ratio)
        self.head = heads.repeat(x.batch, 1)  # the query heads that read each key head, of all sequences

    def of(self, place: Tensor, chunk: Chunk) -> Tensor:
        """(H, M, width), for columns whose keys are at `place` (H or 1, blocks or 1, width)."""
        query = chunk.positions().view(chunk.blocks, chunk.gqa_ratio, chunk.size, 1)
        head = self.head[chunk.heads][:, None, :, None, None]
        return self.bias.at(head, place[:, :, None, None] - query).flatten(1, 3)

    def of_stand_ins(self, member: Tensor, chunk: Chunk) -> Tensor:
        """(H, M, C): log of each stand-in's mass for each query, with the bias of all its keys.

        member (Heads, Nk, C): what each key counts for.
        """
        mass = self.mass(member[chunk.heads], chunk.heads, chunk.first_key, chunk.blocks)
        largest = self.bias.largest[self.head[chunk.heads]]
        return (logarithm(mass) + largest[:, None, :, None, None]).flatten(1, 3)

    def mass(self, member: Tensor, heads: slice, first_key: int, blocks: int) -> Tensor:
        """(H, blocks, R, size, C): sums of `member` (H, Nk, C) times exp(bias - largest) over keys outside the band,
        for blocks of queries from the place `first_key` on.

        Weights of keys within `reach` are one small matrix, the same for all blocks. All keys before have one bias, all
        keys after another: prefix sums give their sums.
        """
        weight = (self.bias.table - self.bias.largest.unsqueeze(-1)).exp()[self.head[heads]]
        width, device = self.size + 2 * self.reach, member.device
        step = torch.arange(width, device=device) - self.reach - torch.arange(self.size, device=device)[:, None]
        near = weight[:, :, step.clamp(-self.reach, self.reach) + self.reach]
        first = first_key - self.reach
        last = first + (blocks - 1) * self.size + width
        if self.band is not None:
            near = near.masked_fill((step >= -self.band[0]) & (step <= self.band[1]), 0.0)
        around = stretch(member, first, last).unfold(1, width, self.size).flatten(1, 2)  # (H, blocks C, width)
        product = torch.unflatten(near.flatten(1, 2) @ around.mT, 1, (-1, self.size))
        mass = torch.unflatten(product, 3, (blocks, -1)).movedim(3, 1)
        sums = pad(member.cumsum(1), (0, 0, 1, 0))
        starts = first + torch.arange(blocks, device=device) * self.size
        ahead = sums[:, starts.clamp(0, self.keys)]
        behind = sums[:, -1:] - sums[:, (starts + width).clamp(0, self.keys)]
        for end, beyond in ((weight[..., 0], ahead), (weight[..., -1], behind.clamp_min(0.0))):
            mass = mass + end[:, None, :, None, None] * beyond[:, :, None, None, :]
        return mass
