"""A fixed number of stand-ins for an unbounded number of keys: what a causal plan keeps of the past.

Evicted keys are absorbed. Each enters as a stand-in of its own; where there are more stand-ins than
places, those are merged whose union moves the output least: Ward's cost

    w_a w_b / (w_a + w_b) (E_q (q . (k_a - k_b))^2 + |v_a - v_b|^2 / var(v)),   w = e^(t g),

the squared difference of scores and values, weighted by the attention that both may expect (w at least e^-8 of the
largest). g is the importance of `fewkeys.sketch.clusters` under the moments of the queries seen so far, t = `TILT`.
Every second stand-in may join one of the others, in the order in which they came; the cheapest do, all at once: nearly
as good as merging pair after pair, and one matrix product. A second round is needed only where more must go than half.

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
        Cost O((M + E)^2 (D + Dv) / 4) per head and round.
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
            summary = _in_order(summary, torch.arange(summary.count, device=key.device))
        while bool((surplus := summary.taken - self.count).gt(0).any()):
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


def _in_order(summary: Summary, place: Tensor) -> Summary:
    """The stand-ins by `place` (M,), the free places after them."""
    is_free = summary.size == 0
    order = place.expand_as(is_free).masked_fill(is_free, place.numel()).argsort(dim=-1, stable=True)
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
    """One round: `surplus` (B, Hkv) of the stand-ins, or half of them all, join others and leave their places free.

    Every head by its own number: what happens in one never depends on another.
    """
    # The first of each pair may join, the second may be joined.
    first, second = slice(0, None, 2), slice(1, None, 2)
    with constants():
        held = summary.rows.detach()
        mass = summary.excess + metric.log_weight(held)
        lightness = (mass.amax(-1, keepdim=True) - mass).clamp_max(-LOWEST_LOG_WEIGHT).exp()  # 1 / w
        centred, image, square = metric.features(held)
        distance = square[..., first, None] + square[..., None, second]
        distance = distance.sub_(2 * image[..., first, :] @ centred[..., second, :].mT).clamp_min_(0.0)
        cost = distance.div_(lightness[..., first, None] + lightness[..., None, second])
        # What has no number costs most, but joins: places must become free.
        cost.nan_to_num_(*[torch.finfo(cost.dtype).max] * 2)
        is_free = summary.size == 0
        cost.masked_fill_(is_free[..., first, None] | is_free[..., None, second], math.inf)
        least, partner = cost.min(-1)
        rank = least.argsort(dim=-1, stable=True).argsort(-1)
        joins = (rank < surplus.unsqueeze(-1)) & (least < math.inf)
        # Weights relative to the heaviest of those that meet.
        joining, joined = mass[..., first].masked_fill(~joins, -math.inf), mass[..., second]
        top = joined.scatter_reduce(-1, partner, joining, "amax")
        part = (joining - top.gather(-1, partner)).exp().masked_fill_(~joins, 0.0)
        rest = (joined - top).exp().masked_fill_(is_free[..., second], 1.0)
        total = rest.scatter_add(-1, partner, part)
        part, rest = part / total.gather(-1, partner), rest / total
        size, old = summary.size[..., second].scatter_add(-1, partner, summary.size[..., first] * joins), summary.excess
    moved = summary.rows[..., first, :]
    rows = summary.rows[..., second, :] * rest.unsqueeze(-1)
    rows = rows.scatter_add(-2, partner.unsqueeze(-1).expand_as(moved), moved * part.unsqueeze(-1))
    with constants():
        # Where nobody joined, the excess stays to the last bit.
        excess = top + total.log() - metric.log_weight(rows.detach())
        excess = torch.where(size == summary.size[..., second], old[..., second], excess)
    remaining = replace(
        summary,
        rows=moved,
        excess=old[..., first].masked_fill(joins, -math.inf),
        size=summary.size[..., first] * ~joins,
    )
    place = torch.arange(summary.count, device=joins.device)
    return _in_order(
        _beside(remaining, replace(summary, rows=rows, excess=excess, size=size)),
        torch.cat([place[first], place[second]]),
    )
