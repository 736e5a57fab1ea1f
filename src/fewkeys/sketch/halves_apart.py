"""The sets of `fewkeys.sketch.halves` for rows that are distributed over processes.

All processes get the same sample of every set, so the same direction, and find the median score by radix selection. The
traffic for each of `count` sets is about twice `SPLIT_SAMPLE` rows, and 256 numbers for every byte of a score.

Rows are (R, G, m, F) with G runs, such as the queries of G query heads: the first runs of all processes come before the
second ones. A label (R, G, m) is the set of every row of this process.
"""

import torch
from torch import Tensor
from torch.nn.functional import pad

from fewkeys.core.totals import Totals
from fewkeys.sketch.halves import direction, sample_step

BYTE = 8


def split_apart(rows: Tensor, metric: Tensor, count: int, totals: Totals) -> Tensor:
    """The labels of rows in the `count` sets of `halves.split`, up to the rounding of scores; `metric` (R, F, F)."""
    rounds, runs, _, dim = rows.shape
    label = torch.zeros(rows.shape[:3], dtype=torch.int64, device=rows.device)
    sets, size = 1, 0
    while sets < count:
        place, real = places(label, sets, totals)
        size = size or -(-int(real.max()) // count) * count
        step = sample_step(size)
        slots = -(-size // step)
        # The last slot is for rows outside the sample.
        slot = torch.where(place % step == 0, label * slots + place // step, sets * slots).flatten(1)
        sample = rows.new_zeros((rounds, sets * slots + 1, dim))
        sample.scatter_(1, slot.unsqueeze(-1).expand(-1, -1, dim), rows.flatten(1, 2))
        sample = totals.sum(sample[:, :-1]).unflatten(1, (sets, slots)).flatten(0, 1)
        real_rows = (torch.arange(slots, device=rows.device) * step < real.unsqueeze(-1)).flatten(0, 1)
        along = direction(sample, real_rows, metric.repeat_interleave(sets, 0)).view(rounds, sets, dim)
        score = (rows.flatten(1, 2) * along.gather(1, label.flatten(1).unsqueeze(-1).expand(-1, -1, dim))).sum(-1)
        left = smallest(score.unflatten(1, (runs, -1)), label, real, size // 2, totals)
        label, sets, size = 2 * label + ~left, 2 * sets, size // 2
    return label


def members(label: Tensor, sets: int, step: int, totals: Totals) -> tuple[Tensor, Tensor]:
    """Which of this process's rows, counted through all runs, are in each set, (R, sets, M), in order, -1 for none; and
    the same of every `step`-th row of the set alone.
    """
    place, _ = places(label, sets, totals)
    label, is_sampled = label.flatten(1), pad((place % step == 0).flatten(1), (0, 1))
    # A last place, of no row: there may be none.
    order = pad(label.argsort(dim=1, stable=True), (0, 1), value=label.shape[1])
    sizes = label.new_zeros((len(label), sets)).scatter_add_(1, label, torch.ones_like(label))
    number = torch.arange(max(1, int(sizes.max())), device=label.device)
    index = ((sizes.cumsum(1) - sizes).unsqueeze(-1) + number).clamp_max(label.shape[1])
    row, real = order.gather(1, index.flatten(1)), number < sizes.unsqueeze(-1)
    sampled, row = is_sampled.gather(1, row).view(index.shape), row.view(index.shape)
    return row.masked_fill(~real, -1), row.masked_fill(~(real & sampled), -1)


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
    """Which rows (R, G, m) have one of the `rank` smallest scores, the first of equal ones, of the `real` (R, sets)."""
    number, sets = ordered(score), real.shape[1]
    left, prefix = torch.full_like(real, rank), torch.zeros_like(real)
    top = BYTE * (score.element_size() - 1)
    for shift in range(top, -1, -BYTE):
        digit, first = number >> shift, shift == top
        if first:  # the signed one
            digit, inside = digit + 128, torch.ones_like(number, dtype=torch.bool)
        else:
            inside, digit = digit >> BYTE == by_set(prefix, label), digit & 255
        bins = torch.where(inside, label * 256 + digit, sets * 256).flatten(1)
        histogram = real.new_zeros((len(real), sets * 256 + 1)).scatter_add_(1, bins, torch.ones_like(bins))
        histogram = totals.sum(histogram[:, :-1]).unflatten(1, (sets, 256))
        upto = histogram.cumsum(-1)
        median_bin = (upto <= left.unsqueeze(-1)).sum(-1, keepdim=True).clamp_max(255)
        left = left - (upto - histogram).gather(-1, median_bin).squeeze(-1)
        median_bin = median_bin.squeeze(-1)
        prefix = median_bin - 128 if first else prefix * 256 + median_bin
    middle = by_set(prefix, label)
    place, _ = places(torch.where(number == middle, label, sets), sets + 1, totals)
    first_of_equal = (number == middle) & (place < by_set(left, label))
    return (number < middle) | first_of_equal | by_set(real <= rank, label)


def by_set(values: Tensor, label: Tensor) -> Tensor:
    """Values of sets (R, sets), for every row (R, G, m)."""
    return values.gather(1, label.flatten(1)).view(label.shape)


def ordered(score: Tensor) -> Tensor:
    """The bits of numbers, int64, in the order of the numbers; zeros are equal."""
    kind = {4: torch.int32, 8: torch.int64}[score.element_size()]
    bits = (score + 0.0).view(kind)
    return torch.where(bits < 0, bits ^ torch.iinfo(kind).max, bits).long()
