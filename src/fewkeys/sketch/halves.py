"""Rows in sets of equal size and similar rows: split at the median along the main direction, recursively.

Distributed rows (R, G, m, F) have G runs, such as the queries of G query heads: the first runs of all processes come
before the second ones. A label (R, G, m) is the set of a row. All processes get the same sample of every set, so the
same direction, and find the median score by radix selection. The traffic for each set is about twice `SPLIT_SAMPLE`
rows, and 256 numbers for every byte of a score.
"""

import torch
from torch import Tensor
from torch.nn.functional import pad

from fewkeys.core.rows import take
from fewkeys.core.totals import WHOLE, Totals

POWER, REFINE, SPLIT_SAMPLE = 2, 2, 64
"""Power iterations, then steps of 2-means, and about how many rows of a set they use."""


def split(rows: Tensor, metric: Tensor, count: int) -> Tensor:
    """Places (R, count, M) of rows (R, m, F) in `count`, a power of two, sets of M = ceil(m / count); -1 for none.

    A set of rows, centred to y_j, is ordered by `y_j . metric u`, metric (R, F, F), and split in the middle. u starts
    as the longest y_j, then come power iterations and steps of balanced 2-means: minus the sum of the left half. Rows
    of a set stay in their order; places without a row come last.
    """
    sets, many = rows.shape[:2]
    place = pad(torch.arange(many, device=rows.device), (0, -many % count), value=-1).expand(sets, 1, -1)
    while place.shape[1] < count:
        parts, real = take(rows, place.clamp_min(0)).flatten(0, 1), (place >= 0).flatten(0, 1)
        step = _sample_step(place.shape[2])
        along = _direction(parts[:, ::step], real[:, ::step], metric.repeat_interleave(place.shape[1], 0))
        order = (parts @ along.mT).squeeze(-1).masked_fill(~real, torch.inf).argsort(dim=-1, stable=True)
        halves = order.unflatten(1, (2, -1)).sort(-1).values.flatten(1)
        place = place.flatten(0, 1).gather(1, halves).view(sets, 2 * place.shape[1], -1)
    return place


def described(rows: Tensor, place: Tensor, totals: Totals = WHOLE) -> tuple[Tensor, Tensor]:
    """The mean rows (R, count, F) of sets, and the covariance (R, F, F) around them."""
    real = (place >= 0).unsqueeze(-1)
    sets = take(rows, place.clamp_min(0))
    size = totals.sum(real.sum(2))
    mean = totals.sum((sets * real).sum(2)) / size.clamp_min(1)
    off = sets.sub_(mean.unsqueeze(2)).mul_(real).flatten(1, 2)
    return mean, totals.sum(off.mT @ off) / size.sum(1).clamp_min(1).unsqueeze(-1)


def _direction(sample: Tensor, real: Tensor, metric: Tensor) -> Tensor:
    """The vector `metric u` (R, 1, F) from the `real` (R, s) of sampled rows (R, s, F)."""
    total = real.sum(1)[:, None, None].clamp_min(1)
    sample = (sample - (sample * real.unsqueeze(-1)).sum(1, keepdim=True) / total) * real.unsqueeze(-1)
    longest = sample.square().sum(-1).argmax(1)
    along = take(sample, longest.unsqueeze(1)) @ metric
    for _ in range(POWER):
        moved = (sample @ along.mT).mT @ sample
        along = moved @ metric
        length = (moved * along).sum(-1, keepdim=True).clamp_min(0).sqrt()
        along = along / length.clamp_min(torch.finfo(sample.dtype).tiny)
    for _ in range(REFINE):
        order = (sample @ along.mT).squeeze(-1).masked_fill(~real, torch.inf).argsort(dim=-1, stable=True)
        along = -take(sample, order[:, : order.shape[1] // 2]).sum(1, keepdim=True) @ metric
    return along


def _sample_step(size: int) -> int:
    return max(1, size // SPLIT_SAMPLE)


def split_apart(rows: Tensor, metric: Tensor, count: int, totals: Totals) -> Tensor:
    """The labels of rows in the `count` sets of `split`, up to the rounding of scores; `metric` (R, F, F)."""
    rounds, runs, _, dim = rows.shape
    label = torch.zeros(rows.shape[:3], dtype=torch.int64, device=rows.device)
    sets, size = 1, 0
    while sets < count:
        place, real = places(label, sets, totals)
        size = size or -(-int(real.max()) // count) * count
        step = _sample_step(size)
        slots = -(-size // step)
        # The last slot is for rows outside the sample.
        slot = torch.where(place % step == 0, label * slots + place // step, sets * slots).flatten(1)
        sample = rows.new_zeros((rounds, sets * slots + 1, dim))
        sample.scatter_(1, slot.unsqueeze(-1).expand(-1, -1, dim), rows.flatten(1, 2))
        sample = totals.sum(sample[:, :-1]).unflatten(1, (sets, slots)).flatten(0, 1)
        real_rows = (torch.arange(slots, device=rows.device) * step < real.unsqueeze(-1)).flatten(0, 1)
        along = _direction(sample, real_rows, metric.repeat_interleave(sets, 0)).view(rounds, sets, dim)
        score = (rows.flatten(1, 2) * take(along, label.flatten(1))).sum(-1)
        left = smallest(score.unflatten(1, (runs, -1)), label, real, size // 2, totals)
        label, sets, size = 2 * label + ~left, 2 * sets, size // 2
    return label


def members(label: Tensor, sets: int, step: int, totals: Totals) -> tuple[Tensor, Tensor]:
    """This process's rows of each set, counted through all runs, in order: (R, sets, M), -1 for none; and of these
    every `step`-th row of the whole set.
    """
    place, sizes = places(label, sets, WHOLE)
    most = max(1, int(sizes.max()))
    index = (label * most + place).flatten(1)
    row = torch.arange(index.shape[1], device=label.device).expand_as(index)
    is_sampled = (places(label, sets, totals)[0] % step == 0).flatten(1)
    none = torch.full((len(label), sets * most), -1, device=label.device)
    of_all, sampled = (none.scatter(1, index, part).view(-1, sets, most) for part in (row, row.where(is_sampled, -1)))
    return of_all, sampled


def places(label: Tensor, sets: int, totals: Totals) -> tuple[Tensor, Tensor]:
    """The place (R, G, m) of every row in its set over all processes, and the size (R, sets) of every set."""
    sizes = torch.zeros((*label.shape[:2], sets), dtype=torch.int64, device=label.device)
    sizes.scatter_add_(2, label, torch.ones_like(label))
    before, total = totals.counted(sizes)
    order = label.argsort(dim=2, stable=True)
    row = torch.arange(label.shape[2], device=label.device).expand_as(label)
    rank_in_shard = torch.empty_like(label).scatter_(2, order, row) - (sizes.cumsum(2) - sizes).gather(2, label)
    return rank_in_shard + (before + total.cumsum(1) - total).gather(2, label), total.sum(1)


def smallest(score: Tensor, label: Tensor, real: Tensor, rank: int, totals: Totals) -> Tensor:
    """Which rows (R, G, m) have the `rank` smallest scores, of equal ones the first, of a set of `real` (R, sets)."""
    sets, left, lower = real.shape[1], torch.full_like(real, rank), torch.full_like(real, -128)
    number = ordered(score)
    for shift in range(8 * (score.element_size() - 1), -1, -8):
        # The next byte of numbers that begin as the median does; other numbers are not in [0, 256).
        byte = (number >> shift) - _by_set(lower, label)
        bins = torch.where((byte >= 0) & (byte < 256), label * 256 + byte, sets * 256).flatten(1)
        histogram = real.new_zeros((len(real), sets * 256 + 1)).scatter_add_(1, bins, torch.ones_like(bins))
        histogram = totals.sum(histogram[:, :-1]).unflatten(1, (sets, 256))
        upto = histogram.cumsum(-1)
        median = (upto <= left.unsqueeze(-1)).sum(-1, keepdim=True).clamp_max(255)
        left = left - (upto - histogram).gather(-1, median).squeeze(-1)
        cut = lower + median.squeeze(-1)
        lower = cut << 8
    at_cut = _by_set(cut, label)
    place, _ = places(torch.where(number == at_cut, label, sets), sets + 1, totals)
    return (number < at_cut) | ((number == at_cut) & (place < _by_set(left, label)))


def _by_set(values: Tensor, label: Tensor) -> Tensor:
    """Values (R, sets) for every row (R, G, m)."""
    return values.gather(1, label.flatten(1)).view(label.shape)


def ordered(score: Tensor) -> Tensor:
    """The bits of numbers, int64, in the order of the numbers; zeros are equal."""
    kind = {4: torch.int32, 8: torch.int64}[score.element_size()]
    bits = (score + 0.0).view(kind)
    return torch.where(bits < 0, bits ^ torch.iinfo(kind).max, bits).long()
