"""A bias of the scores that depends only on the distance of query and key: a table for each head."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class DistanceBias:
    """The bias of the score of a query at place i and key j: `table[h, clamp(j - i, -R, R) + R]`.

    table (Hq, 2 R + 1), in working precision. The bias of a stand-in is the logarithm of the mean of exp(bias) over its
    keys that the query sees, by their weights in the stand-in, or equal ones for cohorts: exact if scores and distances
    are independent inside the cluster.
    """

    table: Tensor

    @property
    def reach(self) -> int:
        """R."""
        return self.table.shape[1] // 2

    @property
    def largest(self) -> Tensor:
        """The largest bias (Hq,), without gradient."""
        return self.table.detach().amax(-1)

    def heads(self, index: Tensor | slice, ratio: int) -> DistanceBias:
        """The bias for the key heads `index`, each read by `ratio` query heads."""
        return DistanceBias(self.table.unflatten(0, (-1, ratio))[index].flatten(0, 1))

    def reaching(self, least: int, most: int) -> DistanceBias:
        """The same bias with a reach of `least` to `most`, which no distance exceeds."""
        reach = min(max(self.reach, least), most)
        index = torch.arange(-reach, reach + 1, device=self.table.device).clamp(-self.reach, self.reach)
        return self if reach == self.reach else DistanceBias(self.table[:, index + self.reach])

    def of(self, first: int, stop: int, keys: int) -> Tensor:
        """The bias (Hq, queries, keys) of queries at places first .. stop - 1."""
        return self.from_last(first, stop, keys).flip(1)

    def from_last(self, first: int, stop: int, keys: int) -> Tensor:
        """`of` with the last query first: a view of (Hq, queries + keys - 1) numbers."""
        distance = torch.arange(1 - stop, keys - first, device=self.table.device)
        return self.at(torch.arange(len(self.table), device=distance.device)[:, None], distance).unfold(1, keys, 1)

    def rows(self, head: Tensor, place: Tensor, keys: int) -> Tensor:
        """The bias (..., keys) of queries of heads `head` (...) at places `place` (...)."""
        return self.at(head.unsqueeze(-1), torch.arange(keys, device=place.device) - place.unsqueeze(-1))

    def at(self, head: Tensor, distance: Tensor) -> Tensor:
        """The bias of heads and distances `j - i`, broadcast."""
        return self.table[head, distance.clamp(-self.reach, self.reach) + self.reach]


def logarithm(mass: Tensor) -> Tensor:
    """log(mass); -inf without a gradient for a mass of zero."""
    return mass.clamp_min(torch.finfo(mass.dtype).tiny).log().masked_fill(mass <= 0, -torch.inf)
