"""A fixed number of stand-ins for an unbounded number of keys: what a causal plan keeps of the past.

Keys are taken up as they are let go. Each enters as a stand-in of its own; where there are more stand-ins than
places, those are merged whose union moves the output least: Ward's cost

    w_a w_b / (w_a + w_b) (E_q (q . (k_a - k_b))^2 + |v_a - v_b|^2 / var(v)),   w = e^(t g),

the squared difference of scores and values, weighted by the attention that both may expect (w at least e^-8 of the
largest). g is the importance of
`fewkeys.sketch.clusters` under the moments of the queries seen so far, t = `TILT`. The merging of one batch takes
`ROUNDS` rounds; in each, stand-ins join the partner of larger weight that costs least, the cheapest first, all at
once: nearly as good as merging pair after pair, and a few matrix products.

A stand-in of keys j has the means of key and value under the weights `e_j = exp(t g_j)`, and the *excess*

    b = log sum_j e_j - t g(mean key),     its score is   q . mean key + b,

so that its mass is right for a query halfway between indifferent and fully attending (`rest.ClusterMeans`). The
excess of a single key is zero whatever the queries become: a stand-in that never had to merge is the key itself.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from fewkeys.sketch.clusters import LOWEST_LOG_WEIGHT, TILT, QueryMoments
from fewkeys.sketch.running import RunningKeys

ROUNDS = 2


@dataclass(frozen=True, eq=False)
class Summary:
    """Stand-ins of the keys let go so far, per sequence and key head.

    rows (B, Hkv, M, D + Dv): keys and values side by side; excess (B, Hkv, M): b above, -inf at places that are still
    free; size (B, Hkv, M): how many keys each speaks for; `seen`: sums over all of these keys. Gradients flow through
    the rows; what merges, and with which weights, is a choice and carries none.
    """

    rows: Tensor
    excess: Tensor
    size: Tensor
    seen: RunningKeys

    @staticmethod
    def empty(count: int, key: Tensor, value: Tensor) -> Summary:
        """`count` free places for keys (B, Hkv, N, D) and values (B, Hkv, N, Dv) in working precision."""
        head = (*key.shape[:2], count)
        return Summary(
            key.new_zeros((*head, key.shape[-1] + value.shape[-1])),
            key.new_full(head, -math.inf),
            key.new_zeros(head),
            RunningKeys.empty(key, value),
        )

    @property
    def count(self) -> int:
        return self.rows.shape[2]

    @property
    def key(self) -> Tensor:
        """(B, Hkv, M, D)."""
        return self.rows[..., : self.seen.key.shape[-1]]

    @property
    def value(self) -> Tensor:
        """(B, Hkv, M, Dv)."""
        return self.rows[..., self.seen.key.shape[-1] :]

    def absorb(self, key: Tensor, value: Tensor, real: Tensor, queries: QueryMoments, *, tilted: bool) -> Summary:
        """With the keys (B, Hkv, E, D) and values, of which `real` (B, Hkv, E) are taken up; the others must be zero.

        `tilted`: weights and masses for softmax as above; otherwise t = 0, plain means of size-weighted keys.
        Cost O((M + E)^2 (D + Dv)) per head.
        """
        new = Summary(
            torch.cat([key, value], -1),
            torch.zeros_like(real, dtype=key.dtype).masked_fill_(~real, -math.inf),
            real.to(key.dtype),
            RunningKeys.empty(key, value).add(key.detach(), value.detach(), real),
        )
        return self.merged(new, queries, tilted=tilted)

    def merged(self, other: Summary, queries: QueryMoments, *, tilted: bool) -> Summary:
        """One summary of this count for the keys of both."""
        both = Summary(
            torch.cat([self.rows, other.rows], 2),
            torch.cat([self.excess, other.excess], 2),
            torch.cat([self.size, other.size], 2),
            self.seen + other.seen,
        )
        return both.reduced(self.count, queries, tilted=tilted)

    def reduced(self, count: int, queries: QueryMoments, *, tilted: bool) -> Summary:
        """With `count` places, of which the stand-ins that remain take the first."""
        surplus = ((self.size > 0).sum(-1) - count).clamp_min(0)
        found = self
        if bool(surplus.any()):
            metric = _Metric(self.seen, queries, tilted)
            for left in range(ROUNDS, 0, -1):
                # Every head by its own surplus: what happens in one never depends on another.
                joining = -(-surplus // left)
                found, surplus = _merge(found, joining, metric), surplus - joining
        order = (found.size == 0).to(torch.int8).argsort(dim=-1, stable=True)[..., :count]
        return Summary(
            _take(found.rows, order), found.excess.gather(-1, order), found.size.gather(-1, order), self.seen
        )


class _Metric:
    """How far apart stand-ins are, and how much attention they may expect."""

    def __init__(self, seen: RunningKeys, queries: QueryMoments, tilted: bool) -> None:
        mean, value_mean, unit = seen.means()
        self.queries, self.tilted, self.dim = queries, tilted, mean.shape[-1]
        self.mean = torch.cat([mean, value_mean], -1)
        second = queries.second
        # Block diagonal: E[q q^T] for the keys, 1 / var(v) for the values.
        self.form = torch.zeros((*second.shape[:2], self.mean.shape[-1], self.mean.shape[-1])).to(second)
        self.form[..., : self.dim, : self.dim] = second
        self.form.diagonal(dim1=-2, dim2=-1)[..., self.dim :] = unit.squeeze(-1)

    def log_weight(self, rows: Tensor) -> Tensor:
        """`t g` of stand-ins (B, Hkv, M, D + Dv)."""
        if not self.tilted:
            return rows.new_zeros(rows.shape[:-1])
        return TILT * self.queries.log_mean_exp((rows - self.mean)[..., : self.dim])

    def ward(self, rows: Tensor, log_mass: Tensor) -> Tensor:
        """The cost (B, Hkv, M, M) of joining row to column."""
        top = log_mass.amax(-1, keepdim=True).nan_to_num(0.0, neginf=0.0)
        lightness = (top - log_mass).clamp_max(-LOWEST_LOG_WEIGHT).exp()  # 1 / w
        right = rows - self.mean
        left = right @ self.form
        square = (left * right).sum(-1)
        size = (rows.shape[0] * rows.shape[1], *rows.shape[2:])
        cost = torch.baddbmm(square.view(-1, 1, size[1]), left.view(size), right.view(size).mT, alpha=-2)
        cost = cost.view(*rows.shape[:3], -1).add_(square.unsqueeze(-1)).clamp_min_(0.0)
        return cost.div_(lightness.unsqueeze(-1) + lightness.unsqueeze(-2))


def _merge(summary: Summary, joining: Tensor, metric: _Metric) -> Summary:
    """One round: `joining` (B, Hkv) stand-ins join others and leave their places free."""
    with torch.no_grad():
        rows = summary.rows.detach()
        log_mass = summary.excess + metric.log_weight(rows)
        gone, valid, leader = _joins(metric.ward(rows, log_mass), log_mass, joining)
        share = (log_mass.gather(-1, gone) - log_mass.gather(-1, leader)).exp().masked_fill_(~valid, 0.0)
        places = torch.arange(summary.count, device=gone.device)
        into = (leader.unsqueeze(-2) == places.unsqueeze(-1)) & valid.unsqueeze(-2)  # (B, Hkv, M, J)
        part = into * share.unsqueeze(-2)
        # The heaviest of those that meet has weight one.
        total = 1 + part.sum(-1)
        left = torch.zeros_like(summary.size, dtype=torch.bool).scatter(-1, gone, valid)
        own = (~left).to(rows.dtype) / total
        size = (summary.size + (into.to(rows.dtype) @ summary.size.gather(-1, gone).unsqueeze(-1)).squeeze(-1)) * ~left
    moved = (part / total.unsqueeze(-1)) @ _take(summary.rows, gone)
    merged = summary.rows * own.unsqueeze(-1) + moved
    with torch.no_grad():
        excess = log_mass + total.log() - metric.log_weight(merged.detach())
        # Who met nobody keeps the excess to the last bit.
        excess = torch.where(into.any(-1), excess, summary.excess).masked_fill_(left, -math.inf)
    return Summary(merged, excess, size, summary.seen)


def _joins(cost: Tensor, log_mass: Tensor, joining: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The `joining` (B, Hkv) stand-ins that join another most cheaply, and whom each ends up with.

    Returns places (B, Hkv, J), which of them count, and the places of the leaders (B, Hkv, J). Everyone may join one of
    larger mass, of equal ones the earlier; so there is no circle, and leaders of leaders are found by jumping.
    """
    rank = log_mass.argsort(dim=-1, descending=True, stable=True).argsort(dim=-1)
    cost.masked_fill_(rank.unsqueeze(-2) >= rank.unsqueeze(-1), math.inf)
    least, partner = cost.min(-1)
    # A free place joins nobody.
    least = least.masked_fill_(log_mass == -math.inf, math.inf)
    most = int(joining.max())
    gone = least.argsort(dim=-1, stable=True)[..., :most]
    valid = torch.arange(most, device=cost.device) < joining.unsqueeze(-1)
    own = torch.arange(cost.shape[-1], device=cost.device).expand_as(partner)
    into = own.scatter(-1, gone, torch.where(valid, partner.gather(-1, gone), gone))
    for _ in range(most.bit_length()):
        into = into.gather(-1, into)
    return gone, valid, into.gather(-1, gone)


def _take(rows: Tensor, order: Tensor) -> Tensor:
    return rows.gather(-2, order.unsqueeze(-1).expand(-1, -1, -1, rows.shape[-1]))
