"""Cohorts: the queries of a key head in equal sets of similar ones, each with statistics of its own.

Rows are split in the middle, and the halves again, along directions in which they differ most (`split`). Inside a
cohort h queries are taken as Gaussian with the cohort's own mean m_h and one covariance W, that of a query around the
mean of its cohort, pooled over cohorts. So the importance of a centred key (`fewkeys.sketch.clusters`) for a cohort,

    g_hj = log E exp(q . k_j) = m_h . k_j + k_j^T W k_j / 2,

is one product more for every cohort. All of it is per sequence and key head, in float32 (float64 for float64 input),
without gradient. Padding queries are in no cohort.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

import fewkeys.native as native
from fewkeys.core.impl import COMPILED, Impl
from fewkeys.core.inputs import Inputs
from fewkeys.core.precision import working
from fewkeys.core.rows import take
from fewkeys.sketch.backend import backend
from fewkeys.sketch.clusters import QUERY_SAMPLE, RIDGE, frame
from fewkeys.sketch.gram import triangular_root
from fewkeys.sketch.sample import centre, sample_keys

METRIC_SAMPLE = 512
"""About how many keys tell how far two queries are from one another."""
POWER, REFINE, SPLIT_SAMPLE = 2, 2, 128
"""Steps towards a direction, steps of 2-means from there, and about how many rows of a set they look at."""


@dataclass(frozen=True, eq=False)
class Cohorts:
    """H cohorts of at most M queries of a key head.

    `place` (B, Hkv, H, M), int64: the queries, counted through all query heads that read the key head, -1 for none;
    `mean` (B, Hkv, H, D): m, of scaled queries; `within` (B, Hkv, D, D): W.
    """

    place: Tensor
    mean: Tensor
    within: Tensor

    @property
    def count(self) -> int:
        return self.place.shape[2]


def cohorts(inputs: Inputs, count: int) -> Cohorts:
    """The queries in `count` cohorts, a power of two; fewer where there are fewer queries. Cost O(n D log count)."""
    with torch.no_grad():
        return inputs.remember(("cohorts", count), lambda: _cohorts(inputs, count))


def own_importance(inputs: Inputs, known: Cohorts) -> Tensor:
    """`k_j^T W k_j / 2` (B, Hkv, Nk) of the centred keys."""

    def compute() -> Tensor:
        key, root = inputs.key.detach(), triangular_root(known.within, RIDGE)
        form = pad(root.mT, (0, 0, 0, 1))  # beside the rows of a root, kernels read a mean query
        shift = form @ frame(inputs).mean.mT
        if (kernels := backend(inputs.impl, key, None, form)) is not None:
            return 0.5 * kernels.statistics(key, form, shift)[0]
        return 0.5 * (working(key) @ root - shift[:, :, :-1].mT).square_().sum(-1)

    return inputs.remember(("own importance", known.count), compute)


def split(rows: Tensor, metric: Tensor, count: int) -> Tensor:
    """Places (R, count, M) of rows (R, m, F) in `count`, a power of two, sets of M = ceil(m / count); -1 for none.

    A set of rows, centred to y_j, is ordered by `y_j . metric u`, metric (R, F, F), and cut in the middle. u starts as
    the longest y_j, goes through power iterations, and then through steps of balanced 2-means: minus the sum of the
    left half. Rows of a set stay in their order; places that are left over stand last in the last sets. Directions of
    large sets see every s-th row only.
    """
    sets, rest = rows.shape[0], -rows.shape[1] % count
    place = pad(torch.arange(rows.shape[1], device=rows.device), (0, rest), value=-1).expand(sets, -1)
    size = place.shape[1]
    rows = pad(rows, (0, 0, 0, rest))
    while size > place.shape[1] // count:
        own, real = rows.reshape(-1, size, rows.shape[-1]), (place >= 0).reshape(-1, size)
        each = metric.repeat_interleave(own.shape[0] // sets, 0)
        order = _along(own, each, real).argsort(dim=-1, stable=True)
        # Rows of a half stay in their old order.
        order = order.unflatten(1, (2, -1)).sort(-1).values.flatten(1)
        rows = own.gather(1, order.unsqueeze(-1).expand_as(own)).reshape(rows.shape)
        place = place.reshape(-1, size).gather(1, order).reshape(place.shape)
        size //= 2
    found: Tensor = place.unflatten(1, (count, -1))
    return found


def described(rows: Tensor, place: Tensor, step: int) -> tuple[Tensor, Tensor]:
    """The mean row (R, count, F) of every set, and the covariance (R, F, F) around the means, both of every `step`-th
    row of each set.
    """
    some = place[..., ::step]
    real = (some >= 0).unsqueeze(-1)
    sets = take(rows.unsqueeze(0), some.clamp_min(0).unsqueeze(0)).squeeze(0)
    mean = (sets * real).sum(2) / real.sum(2).clamp_min(1)
    off = sets.sub_(mean.unsqueeze(2)).mul_(real).flatten(1, 2)
    return mean, off.mT @ off / real.sum((1, 2)).clamp_min(1).unsqueeze(-1)


def _along(rows: Tensor, metric: Tensor, real: Tensor) -> Tensor:
    """Numbers (R, m) by which to order rows (R, m, F), infinite where they are not real."""
    step = max(1, rows.shape[1] // SPLIT_SAMPLE)
    some, there = rows[:, ::step], real[:, ::step]
    total = there.sum(1)[:, None, None].clamp_min(1)
    some = (some - (some * there.unsqueeze(-1)).sum(1, keepdim=True) / total) * there.unsqueeze(-1)
    longest = some.square().sum(-1).argmax(1)
    along = some.gather(1, longest[:, None, None].expand(-1, 1, rows.shape[-1])) @ metric
    for _ in range(POWER):
        moved = (some @ along.mT).mT @ some
        along = moved @ metric
        length = (moved * along).sum(-1, keepdim=True).clamp_min(0).sqrt()
        along = along / length.clamp_min(torch.finfo(rows.dtype).tiny)
    for _ in range(REFINE):
        order = (some @ along.mT).squeeze(-1).masked_fill(~there, torch.inf).argsort(dim=-1, stable=True)
        left = order[:, : order.shape[1] // 2].unsqueeze(-1).expand(-1, -1, rows.shape[-1])
        along = -some.gather(1, left).sum(1, keepdim=True) @ metric
    return (rows @ along.mT).squeeze(-1).masked_fill(~real, torch.inf)


def _cohorts(inputs: Inputs, count: int) -> Cohorts:
    x, real, metric = inputs, inputs.valid_queries, _metric(inputs)
    rows = working(x.grouped_query().detach()).flatten(2, 3)
    if real is None:
        place, mean, within = _of(rows, metric, count, x.impl)
        return Cohorts(place, mean * x.scale, within * x.scale**2)
    # Sequences with as many real queries are split together: a cohort depends on nothing else.
    flat = real[:, None].expand(-1, x.gqa_ratio, -1).flatten(1)
    sizes = flat.sum(1)
    found: list[tuple[Tensor, ...]] = []
    batch = []
    for size in sizes.unique().tolist():
        own = (sizes == size).nonzero().squeeze(-1)
        index = flat[own].to(torch.int8).argsort(dim=-1, descending=True, stable=True)[:, :size]
        index = index[:, None].expand(-1, x.kv_heads, -1)
        place, mean, within = _of(take(rows[own], index), metric[own], count, x.impl)
        if size:
            place = index.gather(2, place.clamp_min(0).flatten(2)).view_as(place).masked_fill_(place < 0, -1)
        found.append((place, mean, within))
        batch.append(own)
    sets, most = (max(part[0].shape[dim] for part in found) for dim in (2, 3))
    back = torch.cat(batch).argsort()
    place = torch.cat([pad(p, (0, most - p.shape[3], 0, sets - p.shape[2]), value=-1) for p, _, _ in found])
    mean = torch.cat([pad(m, (0, 0, 0, sets - m.shape[2])) for _, m, _ in found])
    within = torch.cat([within for _, _, within in found])
    return Cohorts(place[back], mean[back] * x.scale, within[back] * x.scale**2)


def _metric(inputs: Inputs) -> Tensor:
    """G (B, Hkv, D, D): `(q - q')^T G (q - q')` is the sum, over some keys, of squared differences of two scores."""
    some = sample_keys(inputs, METRIC_SAMPLE)
    key = centre(working(some.take(inputs.key.detach())), some.real)
    return key.mT @ key


def _of(rows: Tensor, metric: Tensor, count: int, impl: Impl) -> tuple[Tensor, Tensor, Tensor]:
    """Place, mean and W of the rows (B, H, m, D), all real."""
    batch, heads, many, dim = rows.shape
    if not many:
        none = torch.full((batch, heads, 1, 1), -1, device=rows.device)
        return none, rows.new_zeros((batch, heads, 1, dim)), rows.new_zeros((batch, heads, dim, dim))
    while count > 1 and count // 2 >= many:
        count //= 2
    flat, metric, step = rows.flatten(0, 1), metric.flatten(0, 1), max(1, many // QUERY_SAMPLE)
    if impl in COMPILED and native.readable(flat) and flat.dtype == torch.float32:
        found = native.halve(flat, metric, count, step=step, sample=SPLIT_SAMPLE, power=POWER, refine=REFINE)
    else:
        place = split(flat, metric, count)
        found = place, *described(flat, place, step)
    place, mean, within = (part.unflatten(0, (batch, heads)) for part in found)
    return place, mean, within
