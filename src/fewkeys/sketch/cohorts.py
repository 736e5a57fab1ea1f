"""Cohorts: sets of similar queries of a key head, of equal size, each with its own statistics.

`halves.split` halves the queries recursively along the directions in which they differ most. In a cohort h queries are
modelled as Gaussian with the cohort's mean m_h and one covariance W, that of a query around the mean of its cohort,
pooled over cohorts. So the importance of a centred key (`fewkeys.sketch.clusters`) for a cohort,

    g_hj = log E exp(q . k_j) = m_h . k_j + k_j^T W k_j / 2,

costs one more product for every cohort. Everything is per sequence and key head, in float32 (float64 for float64
input), without gradient. Padding queries are in no cohort.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

import fewkeys.native as native
from fewkeys.core.derivatives import constants
from fewkeys.core.impl import COMPILED
from fewkeys.core.inputs import Inputs
from fewkeys.core.precision import working
from fewkeys.core.rows import take
from fewkeys.sketch.clusters import QUERY_SAMPLE, RIDGE, frame
from fewkeys.sketch.gram import triangular_root
from fewkeys.sketch.halves import POWER, REFINE, SPLIT_SAMPLE, described, split
from fewkeys.sketch.halves_apart import described_apart, split_apart
from fewkeys.sketch.sample import centre, sample_keys

COHORT_QUERIES = 16
"""The smallest cohort: the work of preparing a cohort does not pay for fewer queries."""
COHORTS_PER_QUERY = 3
"""There are at most this many times as many cohorts as a cohort has queries: preparing takes time for each of them, and
attending for each query.
"""
METRIC_SAMPLE = 256, 512
"""At least and at most how many keys, approximately, define the distance of two queries."""


@dataclass(frozen=True, eq=False)
class Cohorts:
    """H cohorts of at most M queries of a key head.

    `place` (B, Hkv, H, M), int64: the queries, counted through all query heads that read the key head, -1 for none;
    `mean` (B, Hkv, H, D): m, of scaled queries; `within` (B, Hkv, D, D): W; `filled` (B, Hkv), int64: how many cohorts
    have queries; empty cohorts come last.
    """

    place: Tensor
    mean: Tensor
    within: Tensor
    filled: Tensor

    @property
    def count(self) -> int:
        return self.place.shape[2]


def cohorts(inputs: Inputs, count: int) -> Cohorts:
    """The queries in `count` cohorts, a power of two; in fewer if cohorts would have too few queries (`_at_most`). Cost
    O(n D log count).
    """
    with constants():
        return inputs.remember(("cohorts", count), lambda: _cohorts(inputs, count))


def half_variance(inputs: Inputs, cohorts: Cohorts, computed: Tensor | None = None) -> Tensor:
    """`k_j^T W k_j / 2` (B, Hkv, Nk) of the centred keys: their importance for queries around zero.

    `computed`: the same by a kernel, for later callers.
    """

    def compute() -> Tensor:
        if computed is not None:
            return computed
        key, middle, root = inputs.key.detach(), frame(inputs).mean, triangular_root(cohorts.within, RIDGE)
        return 0.5 * (working(key) @ root - middle @ root).square_().sum(-1)

    return inputs.remember(("half variance", cohorts.count), compute)


def _cohorts(inputs: Inputs, count: int) -> Cohorts:
    x, real, subset = inputs, inputs.valid_queries, sample_keys(inputs, *METRIC_SAMPLE)
    key = working(subset.take(inputs.key.detach()))
    if x.shard is not None:
        return _distributed(x, key, count)
    rows = working(x.grouped_query().detach()).flatten(2, 3)
    if real is None:
        place, mean, within = _split(x, rows, key, subset.real, count)
        return Cohorts(place, mean, within, _filled(x, place, rows.shape[2]))
    # Sequences with the same number of real queries are split together.
    flat = real[:, None].expand(-1, x.gqa_ratio, -1).flatten(1)
    sizes = flat.sum(1)
    parts: list[tuple[Tensor, ...]] = []
    batch, filled = [], torch.zeros((x.batch, x.kv_heads), dtype=torch.int64, device=x.query.device)
    for size in sizes.unique().tolist():
        sequences = (sizes == size).nonzero().squeeze(-1)
        index = flat[sequences].to(torch.int8).argsort(dim=-1, descending=True, stable=True)[:, :size]
        index = index[:, None].expand(-1, x.kv_heads, -1)
        counts = None if subset.real is None else subset.real[sequences]
        place, mean, within = _split(x, take(rows[sequences], index), key[sequences], counts, count)
        filled[sequences] = _filled(x, place, size)[sequences]
        if size:
            place = index.gather(2, place.clamp_min(0).flatten(2)).view_as(place).masked_fill_(place < 0, -1)
        parts.append((place, mean, within))
        batch.append(sequences)
    sets, most = (max(part[0].shape[dim] for part in parts) for dim in (2, 3))
    order = torch.cat(batch).argsort()
    place = torch.cat([pad(p, (0, most - p.shape[3], 0, sets - p.shape[2]), value=-1) for p, _, _ in parts])
    mean = torch.cat([pad(m, (0, 0, 0, sets - m.shape[2])) for _, m, _ in parts])
    within = torch.cat([within for _, _, within in parts])
    place, mean, within = place[order], mean[order], within[order]
    return Cohorts(place, mean, within, filled)


def _split(inputs: Inputs, rows: Tensor, key: Tensor, real: Tensor | None, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """`place`, `mean` and W of the rows (B, H, m, D), all real; `real` (B, M): which of the keys (B, H, M, D) are.

    G (B, H, D, D) is a metric: `(q - q')^T G (q - q')` is the sum, over these keys, of squared differences of scores.
    """
    batch, heads, total, dim = rows.shape
    if not total:
        none = torch.full((batch, heads, 1, 1), -1, device=rows.device)
        return none, rows.new_zeros((batch, heads, 1, dim)), rows.new_zeros((batch, heads, dim, dim))
    count, step, scale = _at_most(count, total), max(1, total // QUERY_SAMPLE), inputs.scale
    if inputs.impl in COMPILED and native.readable(rows) and rows.dtype == torch.float32:
        steps = {"step": step, "sample": SPLIT_SAMPLE, "power": POWER, "refine": REFINE}
        return native.halve(rows, key, real, count, scale=scale, **steps)
    key, flat = centre(key, real), rows.flatten(0, 1)
    place = split(flat, (key.mT @ key).flatten(0, 1), count)
    parts = place, *described(flat, place, step)
    place, mean, within = (part.unflatten(0, (batch, heads)) for part in parts)
    return place, mean * scale, within * scale**2


def _distributed(inputs: Inputs, key: Tensor, count: int) -> Cohorts:
    """The cohorts of the queries of all processes, with the places of this process's queries."""
    x, totals = inputs, inputs.whole.totals
    key = key - totals.sum(key.sum(-2, keepdim=True)) / totals.sum(key.new_tensor(float(key.shape[2]))).clamp_min(1)
    metric = totals.sum(key.mT @ key)
    total = x.whole.queries * x.gqa_ratio
    count = _at_most(count, total)
    rows = working(x.grouped_query().detach()).flatten(0, 1)
    label = split_apart(rows, metric.flatten(0, 1), count, totals)
    mean, within = described_apart(rows, label, count, max(1, total // QUERY_SAMPLE), totals)
    label = label.flatten(1)
    order, sizes = label.argsort(dim=1, stable=True), label.new_zeros((len(label), count))
    sizes.scatter_add_(1, label, torch.ones_like(label))
    rank = torch.arange(max(1, int(sizes.max())), device=label.device)
    index = ((sizes.cumsum(1) - sizes).unsqueeze(-1) + rank).clamp_max(max(0, label.shape[1] - 1))
    place = order.gather(1, index.flatten(1)).view(index.shape) if label.shape[1] else index
    place = place.masked_fill(rank >= sizes.unsqueeze(-1), -1)
    place, mean, within = (part.unflatten(0, (x.batch, x.kv_heads)) for part in (place, mean, within))
    return Cohorts(place, mean * x.scale, within * x.scale**2, _filled(x, place, total))


def _filled(inputs: Inputs, place: Tensor, total: int) -> Tensor:
    """The number of cohorts (B, Hkv) with queries: `total` queries fill the cohorts one after the other."""
    count = place.shape[2]
    filled = -(-total // -(-total // count)) if total else 0
    return torch.full((inputs.batch, inputs.kv_heads), filled, dtype=torch.int64, device=place.device)


def _at_most(count: int, total: int) -> int:
    """`count` cohorts, a power of two, or fewer: each has COHORT_QUERIES queries or more, and there are at most
    COHORTS_PER_QUERY times as many cohorts as a cohort has queries.
    """
    while count > 1 and max(COHORT_QUERIES, count / COHORTS_PER_QUERY) * count > total:
        count //= 2
    return count
