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
from functools import partial

import torch
from torch import Tensor

from fewkeys.sketch.clusters import LOWEST_LOG_WEIGHT, TILT, QueryMoments
from fewkeys.sketch.running import RunningKeys

ROUNDS = 2


@dataclass(frozen=True, eq=False)
class Summary:
    """Stand-ins of the keys let go so far, per sequence and key head.

    key (B, Hkv, M, D), value (B, Hkv, M, Dv); excess (B, Hkv, M), b above, -inf at places that are still free;
    size (B, Hkv, M): how many keys each speaks for; `seen`: sums over all of these keys. Gradients flow through key and
    value; what merges, and with which weights, is a choice and carries none.
    """

    key: Tensor
    value: Tensor
    excess: Tensor
    size: Tensor
    seen: RunningKeys

    @staticmethod
    def empty(count: int, key: Tensor, value: Tensor) -> Summary:
        """`count` free places for keys (B, Hkv, N, D) and values (B, Hkv, N, Dv) in working precision."""
        head = (*key.shape[:2], count)
        return Summary(
            key.new_zeros((*head, key.shape[-1])),
            value.new_zeros((*head, value.shape[-1])),
            key.new_full(head, -math.inf),
            key.new_zeros(head),
            RunningKeys.empty(key, value),
        )

    @property
    def count(self) -> int:
        return self.key.shape[2]

    def absorb(self, key: Tensor, value: Tensor, real: Tensor, queries: QueryMoments, *, tilted: bool) -> Summary:
        """With the keys (B, Hkv, E, D) and values, of which `real` (B, Hkv, E) are taken up; the others must be zero.

        `tilted`: weights and masses for softmax as above; otherwise t = 0, plain means of size-weighted keys.
        Cost O((M + E)^2 (D + Dv)) per head.
        """
        seen = self.seen.add(key.detach(), value.detach(), real)
        free = torch.zeros_like(real, dtype=key.dtype).masked_fill(~real, -math.inf)
        grown = Summary(
            torch.cat([self.key, key], 2),
            torch.cat([self.value, value], 2),
            torch.cat([self.excess, free], 2),
            torch.cat([self.size, real.to(key.dtype)], 2),
            seen,
        )
        return grown.reduced(self.count, queries, tilted=tilted)

    def merged(self, other: Summary, queries: QueryMoments, *, tilted: bool) -> Summary:
        """One summary of this count for the keys of both."""
        both = Summary(
            torch.cat([self.key, other.key], 2),
            torch.cat([self.value, other.value], 2),
            torch.cat([self.excess, other.excess], 2),
            torch.cat([self.size, other.size], 2),
            self.seen + other.seen,
        )
        return both.reduced(self.count, queries, tilted=tilted)

    def reduced(self, count: int, queries: QueryMoments, *, tilted: bool) -> Summary:
        """With `count` places, of which the stand-ins that remain take the first."""
        surplus = ((self.size > 0).sum(-1) - count).clamp_min(0)
        found = self
        for left in range(ROUNDS, 0, -1) if bool(surplus.any()) else ():
            # Every head by its own surplus: what happens in one never depends on another.
            joining = -(-surplus // left)
            found, surplus = _merge(found, joining, queries, tilted), surplus - joining
        order = (found.size == 0).to(torch.int8).argsort(dim=-1, stable=True)[..., :count]
        return Summary(
            _take(found.key, order),
            _take(found.value, order),
            found.excess.gather(-1, order),
            found.size.gather(-1, order),
            found.seen,
        )


def _merge(summary: Summary, joining: Tensor, queries: QueryMoments, tilted: bool) -> Summary:
    """One round: `joining` (B, Hkv) stand-ins join others and leave their places free."""
    with torch.no_grad():
        mean, value_mean, unit = summary.seen.means()
        weigh = partial(_log_weight, mean=mean, queries=queries) if tilted else _no_weight
        log_mass = summary.excess + weigh(summary.key)
        # Heaviest first, free places last: whoever joins somebody stands after them.
        order = log_mass.argsort(dim=-1, descending=True, stable=True)
        log_mass = log_mass.gather(-1, order)
        key, value = _take(summary.key.detach(), order) - mean, _take(summary.value.detach(), order) - value_mean
        held = log_mass > -math.inf
        into = _joins(_ward(key, value, log_mass, queries.second, unit), held, joining)
        # A free place is nobody, not even for itself.
        target = (into.unsqueeze(-1) == torch.arange(into.shape[-1], device=into.device)) & held.unsqueeze(-1)
        part = target * (log_mass - log_mass.gather(-1, into)).exp().nan_to_num(0.0).unsqueeze(-1)
        total = part.sum(-2)
        part = part / total.clamp_min(1.0).unsqueeze(-2)
        size = (target.mT.to(total.dtype) @ summary.size.gather(-1, order).unsqueeze(-1)).squeeze(-1)
    merged_key, merged_value = part.mT @ _take(summary.key, order), part.mT @ _take(summary.value, order)
    with torch.no_grad():
        excess = log_mass + total.log() - weigh(merged_key.detach())
        # Who met nobody keeps the excess to the last bit.
        excess = torch.where(target.sum(-2) > 1, excess, summary.excess.gather(-1, order))
    return Summary(merged_key, merged_value, excess.masked_fill(size == 0, -math.inf), size, summary.seen)


def _log_weight(key: Tensor, mean: Tensor, queries: QueryMoments) -> Tensor:
    return TILT * queries.log_mean_exp(key - mean)


def _no_weight(key: Tensor) -> Tensor:
    return key.new_zeros(key.shape[:-1])


def _take(rows: Tensor, order: Tensor) -> Tensor:
    return rows.gather(-2, order.unsqueeze(-1).expand(-1, -1, -1, rows.shape[-1]))


def _ward(key: Tensor, value: Tensor, log_mass: Tensor, metric: Tensor, unit: Tensor) -> Tensor:
    """Cost (B, Hkv, M, M) of joining row to column: infinite where the column does not stand before the row."""
    top = log_mass[..., :1].nan_to_num(0.0, neginf=0.0)
    lightness = (top - log_mass).clamp_max(-LOWEST_LOG_WEIGHT).exp()  # 1 / w
    left, right = torch.cat([key @ metric, value * unit], -1), torch.cat([key, value], -1)
    square = (left * right).sum(-1, keepdim=True)
    one = torch.ones_like(square)
    # |x|^2 + |y|^2 - 2 x . y, as one product.
    cost = torch.cat([left * -2, square, one], -1) @ torch.cat([right, one, square], -1).mT
    cost = cost.clamp_min_(0.0).div_(lightness.unsqueeze(-1) + lightness.unsqueeze(-2))
    size = cost.shape[-1]
    return cost.masked_fill_(torch.ones((size, size), dtype=torch.bool, device=cost.device).triu_(), math.inf)


def _joins(cost: Tensor, held: Tensor, joining: Tensor) -> Tensor:
    """Whom everybody ends up with (B, Hkv, M): themselves, except the `joining` (B, Hkv) cheapest of those `held`."""
    least, partner = cost.min(-1)
    least = least.masked_fill(~held, math.inf)
    rank = least.argsort(dim=-1, stable=True).argsort(dim=-1)
    own = torch.arange(cost.shape[-1], device=cost.device)
    into = torch.where(rank < joining.unsqueeze(-1), partner, own)
    for _ in range((cost.shape[-1] - 1).bit_length()):
        into = into.gather(-1, into)
    return into
