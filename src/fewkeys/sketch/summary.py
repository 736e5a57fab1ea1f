"""A fixed number of stand-ins for any number of evicted keys.

Each evicted key enters as a stand-in. Where these exceed the places, those are merged whose merging changes the output
least, by Ward's cost

    w_a w_b / (w_a + w_b) (E_q (q . (k_a - k_b))^2 + |v_a - v_b|^2 / var(v)),   w = e^(t g),

the squared difference of scores and of values, weighted by the attention that both may receive (w is at least e^-8 of
the largest). g is the importance of `fewkeys.sketch.clusters` under the moments of the queries so far, t = `TILT`. Each
stand-in may be merged into one of larger weight; all are merged at once, nearly as well as pair after pair.

A stand-in for keys j has the means of key and value under the weights `e_j = exp(t g_j)`, and the *excess*

    b = log sum_j e_j - t g(mean key),     its score is   q . mean key + b,

which gives it the right mass for a typical query (`rest.ClusterMeans`). A stand-in that was never merged is its key:
the excess is zero.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fewkeys.core.derivatives import constants
from fewkeys.core.fields import Fields
from fewkeys.sketch.clusters import LOWEST_LOG_WEIGHT, TILT, QueryMoments


@dataclass(frozen=True, eq=False)
class Summary(Fields):
    """The stand-ins of the keys evicted so far, in working precision.

    rows (B, Hkv, M, D + Dv): keys and values side by side; excess (B, Hkv, M): b above, -inf at free places; size
    (B, Hkv, M): the number of keys of each; seen (B, Hkv, 1, D + Dv + 2): the sums of all evicted rows and of |v|^2,
    and their number. Gradients flow through the rows, not through the choice of what is merged and its weights.
    """

    rows: Tensor
    excess: Tensor
    size: Tensor
    seen: Tensor

    @staticmethod
    def empty(count: int, rows: Tensor) -> Summary:
        """`count` free places for rows (B, Hkv, N, D + Dv)."""
        batch, heads, _, wide = rows.shape
        return Summary(
            rows.new_zeros((batch, heads, count, wide)),
            rows.new_full((batch, heads, count), -math.inf),
            rows.new_zeros((batch, heads, count)),
            rows.new_zeros((batch, heads, 1, wide + 2)),
        )

    def absorb(self, rows: Tensor, real: Tensor, queries: QueryMoments, *, tilted: bool) -> Summary:
        """The summary with further rows (B, Hkv, E, D + Dv). Those not `real` (B, Hkv, E) must be zero.

        `tilted`: the weights above, for softmax; otherwise t = 0. Cost O((M + E)^2 (D + Dv)) per head.
        """
        count, size = self.rows.shape[2], real.to(rows.dtype)
        square = rows[..., queries.mean.shape[-1] :].square().sum(-1, keepdim=True)
        seen = torch.cat([rows, square, size.unsqueeze(-1)], -1).detach().sum(2, keepdim=True)
        summary = Summary(
            torch.cat([self.rows, rows], 2),
            torch.cat([self.excess, torch.zeros_like(size).masked_fill_(~real, -math.inf)], 2),
            torch.cat([self.size, size], 2),
            self.seen + seen,
        )
        surplus = ((summary.size > 0).sum(-1) - count).clamp_min(0)
        if bool(surplus.any()):
            summary = _joined(summary, surplus, queries, tilted)
        order = (summary.size == 0).to(torch.int8).argsort(dim=-1, stable=True)[..., :count]  # free places last
        excess, size = (part.gather(-1, order) for part in (summary.excess, summary.size))
        return replace(summary, rows=summary.rows.take_along_dim(order.unsqueeze(-1), 2), excess=excess, size=size)


def moments(squares: Tensor) -> QueryMoments:
    """Mean and second moment, for the sum (B, Hkv, D + 1, D + 1) of `[q, 1]^T [q, 1]` over scaled queries q.

    One query of covariance I / D is added: both are defined before the first query.
    """
    dim = squares.shape[-1] - 1
    count = squares[..., -1:, -1:] + 1
    prior = torch.eye(dim, dtype=squares.dtype, device=squares.device) / dim
    return QueryMoments(squares[..., -1:, :-1] / count, (squares[..., :-1, :-1] + prior) / count)


def _joined(summary: Summary, surplus: Tensor, queries: QueryMoments, tilted: bool) -> Summary:
    """The summary with `surplus` (B, Hkv) stand-ins of each head merged into others."""
    places, dim = summary.rows.shape[2], queries.mean.shape[-1]
    place = torch.arange(places, device=surplus.device)
    with constants():
        mean, square = (summary.seen[..., :-1] / summary.seen[..., -1:].clamp_min(1)).tensor_split([-1], -1)
        variance = square - mean[..., dim:].square().sum(-1, keepdim=True)
        value_unit = 1 / variance.clamp_min(torch.finfo(variance.dtype).eps)

        def log_weight(centred: Tensor) -> Tensor:
            """`t g` of stand-ins less the mean of all keys and values."""
            return TILT * queries.log_mean_exp(centred[..., :dim]) if tilted else centred.new_zeros(centred.shape[:-1])

        old, is_free, centred = summary.excess, summary.size == 0, summary.rows.detach() - mean
        mass = old + log_weight(centred)
        lightness = (mass.amax(-1, keepdim=True) - mass).clamp_max(-LOWEST_LOG_WEIGHT).exp()  # 1 / w
        # Ward's cost is a quadratic form of differences, by E[q q^T] of keys and 1 / var(v) of values.
        image = torch.cat([centred[..., :dim] @ queries.second, centred[..., dim:] * value_unit], -1)
        square = (centred * image).sum(-1)
        distance = square.unsqueeze(-1) + square.unsqueeze(-2)
        distance = distance.sub_(2 * image @ centred.mT).clamp_min_(0.0)
        cost = distance.div_(lightness.unsqueeze(-1) + lightness.unsqueeze(-2))
        # NaN costs most. Such a stand-in is still merged if it must be: places must become free.
        cost.nan_to_num_(*[torch.finfo(cost.dtype).max] * 2)
        source, target = mass.unsqueeze(-1), mass.unsqueeze(-2)
        cost.masked_fill_((target < source) | ((target == source) & (place >= place.unsqueeze(-1))), math.inf)
        least, partner = cost.min(-1)
        least.masked_fill_(is_free, math.inf)
        joins = least.argsort(dim=-1, stable=True).argsort(-1) < surplus.unsqueeze(-1)
        # The target of a merge may itself be merged into another.
        partner = torch.where(joins, partner, place)
        for _ in range(places.bit_length()):
            partner = partner.gather(-1, partner)
        # Relative to the heaviest of those that are merged.
        part = (mass - mass.gather(-1, partner)).exp().masked_fill_(is_free, 1.0)
        total = torch.zeros_like(part).scatter_add(-1, partner, part)
        size = torch.zeros_like(part).scatter_add(-1, partner, summary.size)
        share = (part / total.gather(-1, partner)).unsqueeze(-1)
    index = partner.unsqueeze(-1).expand_as(summary.rows)
    rows = torch.zeros_like(summary.rows).scatter_add(-2, index, summary.rows * share)
    with constants():
        # Where nothing was merged, the excess stays bit for bit.
        excess = mass + total.log() - log_weight(rows.detach() - mean)
        excess = torch.where(size == summary.size, old, excess).masked_fill_(size == 0, -math.inf)
    return replace(summary, rows=rows, excess=excess, size=size)
