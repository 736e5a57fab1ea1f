"""A fixed number of stand-ins for an unbounded number of keys: what a causal plan keeps of the past.

Evicted keys are absorbed. Each enters as a stand-in of its own; where there are more stand-ins than
places, those are merged whose union moves the output least: Ward's cost

    w_a w_b / (w_a + w_b) (E_q (q . (k_a - k_b))^2 + |v_a - v_b|^2 / var(v)),   w = e^(t g),

the squared difference of scores and values, weighted by the attention that both may expect (w at least e^-8 of the
largest). g is the importance of `fewkeys.sketch.clusters` under the moments of the queries seen so far, t = `TILT`.
Each stand-in may join one of larger weight; the cheapest do, all at once, as many as must: nearly as good as merging
pair after pair, and one matrix product.

A stand-in of keys j has the means of key and value under the weights `e_j = exp(t g_j)`, and the *excess*

    b = log sum_j e_j - t g(mean key),     its score is   q . mean key + b,

so that its mass is right for a query halfway between indifferent and fully attending (`rest.ClusterMeans`). The
excess of a single key is zero whatever the queries become: a stand-in that never had to merge is the key itself.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

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
        summary = replace(_beside(self, new), seen=self.seen + new.seen)
        metric = _Metric(summary.seen, queries, tilted)
        if bool((summary.size == 0).any()):
            summary = _free_last(summary)
        surplus = (summary.taken - self.count).clamp_min(0)
        if bool(surplus.any()):
            summary = _joined(summary, surplus, metric)
        rows, excess, size = (part[:, :, : self.count] for part in (summary.rows, summary.excess, summary.size))
        return replace(summary, rows=rows.contiguous(), excess=excess, size=size)


def _beside(one: Summary, other: Summary) -> Summary:
    return replace(
        one,
        rows=torch.cat([one.rows, other.rows], 2),
        excess=torch.cat([one.excess, other.excess], 2),
        size=torch.cat([one.size, other.size], 2),
    )


def _free_last(summary: Summary) -> Summary:
    """The stand-ins in their order, the free places after them."""
    order = (summary.size == 0).to(torch.int8).argsort(dim=-1, stable=True)
    index = order.unsqueeze(-1).expand_as(summary.rows)
    return replace(
        summary,
        rows=summary.rows.gather(-2, index),
        excess=summary.excess.gather(-1, order),
        size=summary.size.gather(-1, order),
    )


class _Metric:
    """How far apart stand-ins are, and how much attention they may expect."""

    def __init__(self, seen: RunningKeys, queries: QueryMoments, tilted: bool) -> None:
        mean, value_mean, self.unit = seen.means()
        self.mean = torch.cat([mean, value_mean], -1)
        self.queries, self.tilted, self.dim = queries, tilted, mean.shape[-1]

    def features(self, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Of stand-ins (B, Hkv, M, D + Dv): x and `A x` (B, Hkv, M, D + Dv), and `x^T A x` (B, Hkv, M).

        x is the stand-in less the mean of all keys and values; A is block diagonal, `E[q q^T]` for the keys and
        1 / var(v) for the values.
        """
        centred = rows - self.mean
        image = torch.cat([centred[..., : self.dim] @ self.queries.second, centred[..., self.dim :] * self.unit], -1)
        return centred, image, (centred * image).sum(-1)

    def log_weight(self, rows: Tensor) -> Tensor:
        """`t g` of stand-ins (B, Hkv, M, D + Dv)."""
        if not self.tilted:
            return rows.new_zeros(rows.shape[:-1])
        return TILT * self.queries.log_mean_exp((rows - self.mean)[..., : self.dim])


def _joined(summary: Summary, surplus: Tensor, metric: _Metric) -> Summary:
    """With `surplus` (B, Hkv) of the stand-ins in others, their places free.

    Every head by its own number: what happens in one never depends on another.
    """
    place = torch.arange(summary.count, device=surplus.device)
    with constants():
        held, old, is_free = summary.rows.detach(), summary.excess, summary.size == 0
        mass = old + metric.log_weight(held)
        lightness = (mass.amax(-1, keepdim=True) - mass).clamp_max(-LOWEST_LOG_WEIGHT).exp()  # 1 / w
        centred, image, square = metric.features(held)
        distance = square.unsqueeze(-1) + square.unsqueeze(-2)
        distance = distance.sub_(2 * image @ centred.mT).clamp_min_(0.0)
        cost = distance.div_(lightness.unsqueeze(-1) + lightness.unsqueeze(-2))
        # What has no number costs most, but joins: places must become free.
        cost.nan_to_num_(*[torch.finfo(cost.dtype).max] * 2)
        one, other = mass.unsqueeze(-1), mass.unsqueeze(-2)
        cost.masked_fill_((other < one) | ((other == one) & (place >= place.unsqueeze(-1))), math.inf)
        least, partner = cost.min(-1)
        least.masked_fill_(is_free, math.inf)
        joins = least.argsort(dim=-1, stable=True).argsort(-1) < surplus.unsqueeze(-1)
        # A leader may join another itself.
        partner = torch.where(joins, partner, place)
        for _ in range(summary.count.bit_length()):
            partner = partner.gather(-1, partner)
        # The heaviest of those that meet has weight one.
        part = (mass - mass.gather(-1, partner)).exp().masked_fill_(is_free, 1.0)
        total = torch.zeros_like(part).scatter_add(-1, partner, part)
        size = torch.zeros_like(part).scatter_add(-1, partner, summary.size)
        share = (part / total.gather(-1, partner)).unsqueeze(-1)
    index = partner.unsqueeze(-1).expand_as(summary.rows)
    rows = torch.zeros_like(summary.rows).scatter_add(-2, index, summary.rows * share)
    with constants():
        # Where nobody joined, the excess stays to the last bit.
        excess = mass + total.log() - metric.log_weight(rows.detach())
        excess = torch.where(size == summary.size, old, excess).masked_fill_(size == 0, -math.inf)
    return _free_last(replace(summary, rows=rows, excess=excess, size=size))
