"""When a query has opened enough: what part of its softmax mass stays in closed nodes, by an estimate or by a bound.

For a node of z keys with mean mu, spread as in `fewkeys.tree.descent`, and radius r = max_j |k_j - mu|,

    z exp(q . mu)  <=  sum_j exp(q . k_j)  <=  z exp(q . mu + |q| r)

by the inequalities of Jensen and of Cauchy and Schwarz. These are its least and its most. What is no certificate takes
for both what z independent Gaussian scores of variance s = spread would have (Derrida's random energy model, 1981):

    q . mu + log z + s / 2    where s < 2 log z,    q . mu + sqrt(2 s log z)    beyond, where the largest decide alone

The logit of a stand-in is lower: it is to be right for the output, whose largest keys are elsewhere by then, while
this is to miss no mass. On level l of L, from 0, a query opens the fewest nodes, best ranks first, that leave

    most of all closed so far  <=  (1 - mass) (l + 1) / L (near keys + least of all closed, and of this level's nodes)

or as many as its slots allow. So, where they allow it, what stays closed in the end has at most 1 - mass of the whole.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from fewkeys.core.derivatives import constants
from fewkeys.tree.forest import Forest, Nodes, Table, take

ROUNDING = 1e-5
"""Part of itself by which a radius is larger than it was computed to be."""


@dataclass(frozen=True)
class Enough:
    """`mass`: the share that is to be exact; `certified`: by bounds, which take the radius of every node."""

    mass: float
    certified: bool = False


@dataclass(eq=False)
class Mass:
    """Logarithms (H, M) of what queries know by now: `seen`, the least that there is beside the nodes of a level, and
    `closed`, the most that stays closed.
    """

    enough: Enough
    seen: Tensor
    closed: Tensor

    @staticmethod
    def of(enough: Enough, near: Tensor) -> Mass:
        """Before the first level; near: the logarithm of the mass of near keys."""
        return Mass(enough, near, torch.full_like(near, -torch.inf))

    def stop(self, least: Tensor, most: Tensor, order: Tensor, part: float, beam: int) -> Tensor:
        """How many nodes (H, M) are opened, at most `beam`, of (H, M, C) candidates in the `order` of their ranks.

        least, most: logarithms of their masses; part: (l + 1) / L.
        """
        least, most = least.gather(-1, order), most.gather(-1, order)
        tail = most.flip(-1).logcumsumexp(-1).flip(-1)
        tail = torch.cat([tail, torch.full_like(tail[..., :1], -torch.inf)], -1)
        allowed = torch.logaddexp(self.seen, least.logsumexp(-1)) + _log(part * (1 - self.enough.mass))
        fits = torch.logaddexp(self.closed.unsqueeze(-1), tail) <= allowed.unsqueeze(-1)
        # Candidates that are not there have no mass.
        count = (~fits).sum(-1).clamp_max(beam).minimum((most > -torch.inf).sum(-1))
        self.closed = torch.logaddexp(self.closed, tail.gather(-1, count.unsqueeze(-1)).squeeze(-1))
        stays = torch.arange(order.shape[-1], device=order.device) >= count.unsqueeze(-1)
        self.seen = torch.logaddexp(self.seen, least.masked_fill(~stays, -torch.inf).logsumexp(-1))
        return count


def expected(spread: Tensor, size: int) -> Tensor:
    """What is to be added to the score of the mean for the expected logarithm of the mass of `size` keys."""
    most = 2 * math.log(size)
    return torch.where(spread < most, most / 2 + spread / 2, (spread * most).sqrt())


def _log(x: float) -> float:
    return math.log(x) if x > 0 else -math.inf


@constants()
def with_radii(forest: Forest, nodes: Nodes, key: Tensor) -> dict[int, Table]:
    """The same nodes with their radii (H, R_s), from keys (H, n, D). Cost O(n log n D)."""
    found = {}
    for size, table in nodes.items():
        inside = take(key, forest.order[:, : table.key.shape[1] * size]).unflatten(1, (-1, size))
        radius = torch.linalg.vector_norm(inside - table.key.unsqueeze(2), dim=-1).amax(-1)
        found[size] = Table(table.key, table.value, table.variance, radius * (1 + ROUNDING))
    return found
