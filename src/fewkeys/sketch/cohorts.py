"""Cohorts: sets of similar queries of a key head, of equal size, each with its own statistics.

`halves.split` halves the queries recursively. The queries of cohort h are taken as Gaussian with the cohort's mean m_h
and one covariance W around the means, pooled over cohorts. So the importance of a centred key
(`fewkeys.sketch.clusters`) costs one product for every cohort:

    g_hj = log E exp(q . k_j) = m_h . k_j + k_j^T W k_j / 2.

All in working precision, without gradient.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from fewkeys.core.graph import Columns
from fewkeys.core.inputs import Inputs
from fewkeys.core.precision import working
from fewkeys.core.rows import marked_places, take
from fewkeys.native import kernels
from fewkeys.sketch.backend import compiled_at_once, statistic
from fewkeys.sketch.clusters import QUERY_SAMPLE, TILT, frame, query_covariance, query_moments
from fewkeys.sketch.halves import POWER, REFINE, SPLIT_SAMPLE, described, members, split, split_apart
from fewkeys.sketch.sample import centre, sample_keys

COHORT_TILT = 0.8
"""The t of several cohorts. They are narrow, so it is nearer to one than `TILT`."""
COHORT_QUERIES = 16
"""The smallest cohort that pays for its preparation."""
COHORTS_PER_QUERY = 3
"""The most cohorts for each query of one: preparing costs by the cohort, attending by the query."""
METRIC_SAMPLE = 256, 512
"""About how many keys, at least and at most, define the distance of two queries."""


@dataclass(frozen=True, eq=False)
class Cohorts:
    """H cohorts of at most M real queries of a key head; empty ones come last.

    `place` (B, Hkv, H, M), int64: the queries, counted through all query heads that read the key head, -1 for none;
    `mean` m (B, Hkv, H, D), of scaled queries; `within` W (B, Hkv, D, D); `filled` (B, Hkv), int64: how many cohorts
    have queries; `are_one`: whether one cohort was asked for.
    """

    place: Tensor
    mean: Tensor
    within: Tensor
    filled: Tensor
    are_one: bool = False

    @property
    def count(self) -> int:
        return self.place.shape[2]

    @property
    def tilt(self) -> float:
        """The t of `fewkeys.sketch.tilted`."""
        return TILT if self.are_one else COHORT_TILT

    def lists(self, index: Tensor, used: Tensor) -> Columns:
        """Columns for the lists (B, Hkv, H, S) of the cohorts."""
        return Columns(index, used, self.place.shape[3], None if self.are_one else self.place)


@statistic
def cohorts(inputs: Inputs, count: int) -> Cohorts:
    """`count` cohorts, a power of two, or fewer (`_at_most`). Cost O(n D log count)."""
    if count == 1:
        return _one(inputs)
    x, real, subset = inputs, inputs.valid_queries, sample_keys(inputs, *METRIC_SAMPLE)
    key = working(subset.take(x.key.detach()))
    rows = working(x.grouped_query().detach()).flatten(2, 3)
    if real is None:
        return _split(x, rows, key, subset.real, count)
    # Sequences with the same number of real queries are split together.
    real = real[:, None].expand(-1, x.gqa_ratio, -1).flatten(1)
    sizes, sequences, parts = real.sum(1), [], []
    for size in sizes.unique():
        batch = (sizes == size).nonzero().squeeze(-1)
        index = marked_places(real[batch])[:, None].expand(-1, x.kv_heads, -1)
        real_keys = None if subset.real is None else subset.real[batch]
        part = _split(x, take(rows[batch], index), key[batch], real_keys, count)
        place = index.gather(2, part.place.clamp_min(0).flatten(2)).view_as(part.place)
        sequences.append(batch)
        parts.append(replace(part, place=place.masked_fill_(part.place < 0, -1)))
    sets, most = (max(1, *(part.place.shape[dim] for part in parts)) for dim in (2, 3))
    order = torch.cat(sequences).argsort()
    places = [pad(p.place, (0, most - p.place.shape[3], 0, sets - p.count), value=-1) for p in parts]
    means = [pad(p.mean, (0, 0, 0, sets - p.count)) for p in parts]
    fields = places, means, [p.within for p in parts], [p.filled for p in parts]
    place, mean, within, filled = (torch.cat(rows)[order] for rows in fields)
    return Cohorts(place, mean, within, filled)


def _one(inputs: Inputs) -> Cohorts:
    x, real = inputs, inputs.valid_queries
    frame(x)  # its kernel computes the moments, too
    mean, covariance = query_moments(x).mean, query_covariance(x)
    place = torch.arange(x.gqa_ratio * x.queries, device=x.query.device)
    place = place if real is None else place.where(real.repeat(1, x.gqa_ratio)[:, None, None], -1)
    filled = torch.full((x.batch, x.kv_heads), 1, device=place.device)
    return Cohorts(place.expand(x.batch, x.kv_heads, 1, -1), mean, covariance, filled, are_one=True)


def _split(inputs: Inputs, rows: Tensor, key: Tensor, real: Tensor | None, count: int) -> Cohorts:
    """The cohorts of rows (B, H, m, D), all real; `real` (B, M): which of the keys (B, H, M, D) are.

    In the metric, the squared distance of two queries is the sum over these keys of squared differences of scores.
    """
    sets, whole, scale = rows.shape[:2], inputs.whole, inputs.scale
    total = rows.shape[2] if inputs.shard is None else inputs.gqa_ratio * whole.queries
    count, step = _at_most(count, total), max(1, total // QUERY_SAMPLE)
    filled = torch.full(sets, -(-total // -(-total // count)) if total else 0, device=rows.device)
    if total and compiled_at_once(inputs):
        steps = {"step": step, "sample": SPLIT_SAMPLE, "power": POWER, "refine": REFINE}
        return Cohorts(*kernels.halve(rows, key, real, count, scale=scale, **steps), filled)
    key, rows = centre(key, real, whole.totals), rows.flatten(0, 1)
    metric = whole.totals.sum(key.mT @ key).flatten(0, 1)
    if inputs.shard is None:
        place = split(rows, metric, count)
        sampled = place[..., ::step]
    else:
        runs = rows.unflatten(1, (inputs.gqa_ratio, inputs.queries))
        place, sampled = members(split_apart(runs, metric, count, whole.totals), count, step, whole.totals)
        rows = pad(rows, (0, 0, 0, 1))  # this process may have none
    parts = place, *described(rows, sampled, whole.totals)
    place, mean, within = (part.unflatten(0, sets) for part in parts)
    return Cohorts(place, mean * scale, within * scale**2, filled)


def _at_most(count: int, total: int) -> int:
    """The largest power of two up to `count` that both limits above allow for `total` queries."""
    while count > 1 and max(COHORT_QUERIES, count / COHORTS_PER_QUERY) * count > total:
        count //= 2
    return count
