"""A bias of the scores that depends only on the distance of query and key: a table for each head."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class DistanceBias:
    """The bias of the score of a query at place i and key j: `table[h, clamp(j - i, -R, R) + R]`.

    table (Hq, 2 R + 1), in working precision. The keys of a stand-in have many distances; its bias is the logarithm of
    the mean of exp(bias) over its keys that the query sees, with their weights in the stand-in. If scores and distances
    were independent inside a cluster, its mass would be exact.
    """

    table: Tensor

    @property
    def reach(self) -> int:
        """R: at larger distances the bias is constant on either side."""
        return self.table.shape[1] // 2

    @property
    def largest(self) -> Tensor:
        """The largest bias (Hq,), without gradient."""
        return self.table.detach().amax(-1)

    def heads(self, index: Tensor, ratio: int) -> DistanceBias:
        """The bias for the key heads `index`; `ratio` query heads read each."""
        return DistanceBias(self.table.unflatten(0, (-1, ratio))[index].flatten(0, 1))

    def reaching(self, least: int, most: int) -> DistanceBias:
        """The same bias with a reach from `least` to `most`; no distance exceeds `most`."""
        reach = min(max(self.reach, least), most)
        index = torch.arange(-reach, reach + 1, device=self.table.device).clamp(-self.reach, self.reach)
        return self if reach == self.reach else DistanceBias(self.table[:, index + self.reach])

    def of(self, first: int, stop: int, keys: int) -> Tensor:
        """The bias (Hq, queries, keys) of queries at places first .. stop - 1. As large as their scores."""
        heads, places = (torch.arange(*ends, device=self.table.device) for ends in ((len(self.table),), (first, stop)))
        return self.rows(heads[:, None], places, keys)

    def rows(self, head: Tensor, place: Tensor, keys: int) -> Tensor:
        """The bias (..., keys) of queries of heads `head` (...) at places `place` (...)."""
        distance = torch.arange(keys, device=place.device) - place.unsqueeze(-1)
        return self.table[head.unsqueeze(-1), distance.clamp(-self.reach, self.reach) + self.reach]


def logarithm(mass: Tensor) -> Tensor:
    """log(mass); -inf without a gradient for a mass of zero."""
    return mass.clamp_min(torch.finfo(mass.dtype).tiny).log().masked_fill(mass <= 0, -torch.inf)
