"""A fixed number of stand-ins for an unbounded number of keys: what a causal plan keeps of the past.

Evicted keys are absorbed. Each enters as a stand-in of its own; where there are more stand-ins than
places, those are merged whose union moves the output least: Ward's cost

    w_a w_b / (w_a + w_b) (E_q (q . (k_a - k_b))^2 + |v_a - v_b|^2 / var(v)),   w = e^(t g),

the squared difference of scores and values, weighted by the attention that both may expect (w at least e^-8 of the
largest). g is the importance of `fewkeys.sketch.clusters` under the moments of the queries seen so far, t = `TILT`.
Merging goes in rounds; in each, stand-ins join the partner of larger weight that costs least, the cheapest first, all
at once: nearly as good as merging pair after pair, and a few matrix products. There are two: in the first, where keys
are absorbed, only those join (others may be joined), half as many as must; in the second all may.

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

from fewkeys.core.derivatives import constants
from fewkeys.core.fields import Fields
from fewkeys.past.running import RunningKeys
from fewkeys.sketch.clusters import LOWEST_LOG_WEIGHT, TILT, QueryMoments


@dataclass(frozen=True, eq=False)
class Summary(Fields):
    """Stand-ins of the keys evicted so far, per sequence and key head.

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

    @property
    def taken(self) -> Tensor:
        """(B, Hkv): places that are not free."""
        return (self.size > 0).sum(-1)

    def absorb(self, key: Tensor, value: Tensor, real: Tensor, queries: QueryMoments, *, tilted: bool) -> Summary:
        """With the keys (B, Hkv, E, D) and values, of which `real` (B, Hkv, E) are absorbed; the others must be zero.

        `tilted`: weights and masses for softmax as above; otherwise t = 0, plain means of size-weighted keys.
        Cost O((M + E)^2 (D + Dv)) per head.
        """
        new = Summary(
            torch.cat([key, value], -1),
            torch.zeros_like(real, dtype=key.dtype).masked_fill_(~real, -math.inf),
            real.to(key.dtype),
            RunningKeys.empty(key, value).add(key.detach(), value.detach(), real),
        )
        metric = _Metric(self.seen + new.seen, queries, tilted)
        surplus = (self.taken + new.taken - self.count).clamp_min(0)
        both = _joined(_beside(self, new), surplus // 2, metric, self.count)
        return _first(_joined(both, surplus - surplus // 2, metric), self.count)


def _beside(one: Summary, other: Summary) -> Summary:
    return Summary(
        torch.cat([one.rows, other.rows], 2),
        torch.cat([one.excess, other.excess], 2),
        torch.cat([one.size, other.size], 2),
        one.seen + other.seen,
    )


def _first(summary: Summary, count: int) -> Summary:
    """With `count` places, the first of which the stand-ins take, in their order; there are no more."""
    order = (summary.size == 0).to(torch.int8).argsort(dim=-1, stable=True)[..., :count]
    parts = summary.excess.gather(-1, order), summary.size.gather(-1, order)
    return Summary(_take(summary.rows, order), *parts, summary.seen)


class _Metric:
    """How far apart stand-ins are, and how much attention they may expect."""

    def __init__(self, seen: RunningKeys, queries: QueryMoments, tilted: bool) -> None:
        mean, value_mean, unit = seen.means()
        self.queries, self.tilted, self.dim = queries, tilted, mean.shape[-1]
        self.mean = torch.cat([mean, value_mean], -1)
        second = queries.second
        # Block diagonal: E[q q^T] for the keys, 1 / var(v) for the values.
        self.form = second.new_zeros((*second.shape[:2], self.mean.shape[-1], self.mean.shape[-1]))
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


def _joined(summary: Summary, joining: Tensor, metric: _Metric, first: int = 0) -> Summary:
    """One round: `joining` (B, Hkv) of the stand-ins at places from `first` on join others and leave theirs free.

    Every head by its own number: what happens in one never depends on another.
    """
    if not bool(joining.any()):
        return summary
    with constants():
        rows = summary.rows.detach()
        log_mass = summary.excess + metric.log_weight(rows)
        gone, valid, leader = _joins(rows, log_mass, joining, metric, first)
        coefficient = (log_mass.gather(-1, gone) - log_mass.gather(-1, leader)).exp().masked_fill_(~valid, 0.0)
        places = torch.arange(summary.count, device=gone.device)
        into = (leader.unsqueeze(-2) == places.unsqueeze(-1)) & valid.unsqueeze(-2)  # (B, Hkv, M, J)
        part = into * coefficient.unsqueeze(-2)
        # The heaviest of those that meet has weight one.
        total = 1 + part.sum(-1)
        left = torch.zeros_like(summary.size, dtype=torch.bool).scatter(-1, gone, valid)
        share = (~left).to(rows.dtype) / total
        size = (summary.size + (into.to(rows.dtype) @ summary.size.gather(-1, gone).unsqueeze(-1)).squeeze(-1)) * ~left
    moved = (part / total.unsqueeze(-1)) @ _take(summary.rows, gone)
    merged = summary.rows * share.unsqueeze(-1) + moved
    with constants():
        excess = log_mass + total.log() - metric.log_weight(merged.detach())
        # Who met nobody keeps the excess to the last bit.
        excess = torch.where(into.any(-1), excess, summary.excess).masked_fill_(left, -math.inf)
    return Summary(merged, excess, size, summary.seen)


def _joins(
    rows: Tensor, log_mass: Tensor, joining: Tensor, metric: _Metric, first: int
) -> tuple[Tensor, Tensor, Tensor]:
    """The `joining` (B, Hkv) stand-ins from `first` on that join another most cheaply, and whom each ends up with.

    Returns places (B, Hkv, J), which of them count, and the places of the leaders (B, Hkv, J). Everyone may join one of
    larger mass, of equal ones the earlier; so there is no circle, and leaders of leaders are found by jumping.
    """
    # From here on in the order of mass: who may be joined comes before.
    order = log_mass.argsort(dim=-1, descending=True, stable=True)
    log_mass = log_mass.gather(-1, order)
    cost = metric.ward(_take(rows, order), log_mass)
    after = torch.ones(cost.shape[-2:], dtype=torch.bool, device=cost.device).triu_()
    least, partner = cost.masked_fill_(after, math.inf).min(-1)
    # A free place joins nobody.
    least = least.masked_fill_((log_mass == -math.inf) | (order < first), math.inf)
    most = int(joining.max())
    gone = least.argsort(dim=-1, stable=True)[..., :most]
    valid = torch.arange(most, device=cost.device) < joining.unsqueeze(-1)
    places = torch.arange(cost.shape[-1], device=cost.device).expand_as(partner)
    into = places.scatter(-1, gone, torch.where(valid, partner.gather(-1, gone), gone))
    for _ in range(most.bit_length()):
        into = into.gather(-1, into)
    return order.gather(-1, gone), valid, order.gather(-1, into.gather(-1, gone))


def _take(rows: Tensor, order: Tensor) -> Tensor:
    return rows.gather(-2, order.unsqueeze(-1).expand(-1, -1, -1, rows.shape[-1]))
