"""Rows in sets of equal size and similar rows: split at the median along the main direction, recursively."""

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
    of a set stay in their order; unused places come last in the last sets.
    """
    (sets, many, dim), fill = rows.shape, -rows.shape[1] % count
    place = pad(torch.arange(many, device=rows.device), (0, fill), value=-1).expand(sets, -1)
    size, rows = many + fill, pad(rows, (0, 0, 0, fill))
    while size > (many + fill) // count:
        parts, real = rows.reshape(-1, size, dim), (place >= 0).reshape(-1, size)
        metrics = metric.repeat_interleave(parts.shape[0] // sets, 0)
        step = sample_step(size)
        along = direction(parts[:, ::step], real[:, ::step], metrics)
        order = (parts @ along.mT).squeeze(-1).masked_fill(~real, torch.inf).argsort(dim=-1, stable=True)
        # Rows of a half stay in their old order.
        order = order.unflatten(1, (2, -1)).sort(-1).values.flatten(1)
        rows = parts.gather(1, order.unsqueeze(-1).expand_as(parts)).reshape(rows.shape)
        place = place.reshape(-1, size).gather(1, order).reshape(place.shape)
        size //= 2
    return place.reshape(sets, count, size)


def described(rows: Tensor, place: Tensor, totals: Totals = WHOLE) -> tuple[Tensor, Tensor]:
    """The mean row (R, count, F) of every set, and the covariance (R, F, F) around them."""
    real = (place >= 0).unsqueeze(-1)
    sets = take(rows.unsqueeze(0), place.clamp_min(0).unsqueeze(0)).squeeze(0)
    size = totals.sum(real.sum(2))
    mean = totals.sum((sets * real).sum(2)) / size.clamp_min(1)
    off = sets.sub_(mean.unsqueeze(2)).mul_(real).flatten(1, 2)
    return mean, totals.sum(off.mT @ off) / size.sum(1).clamp_min(1).unsqueeze(-1)


def direction(sample: Tensor, real: Tensor, metric: Tensor) -> Tensor:
    """The vector (R, 1, F) whose products with rows order the sets, from samples (R, s, F), those `real` (R, s)."""
    total = real.sum(1)[:, None, None].clamp_min(1)
    sample = (sample - (sample * real.unsqueeze(-1)).sum(1, keepdim=True) / total) * real.unsqueeze(-1)
    longest = sample.square().sum(-1).argmax(1)
    along = sample.gather(1, longest[:, None, None].expand(-1, 1, sample.shape[-1])) @ metric
    for _ in range(POWER):
        moved = (sample @ along.mT).mT @ sample
        along = moved @ metric
        length = (moved * along).sum(-1, keepdim=True).clamp_min(0).sqrt()
        along = along / length.clamp_min(torch.finfo(sample.dtype).tiny)
    for _ in range(REFINE):
        order = (sample @ along.mT).squeeze(-1).masked_fill(~real, torch.inf).argsort(dim=-1, stable=True)
        left = order[:, : order.shape[1] // 2].unsqueeze(-1).expand(-1, -1, sample.shape[-1])
        along = -sample.gather(1, left).sum(1, keepdim=True) @ metric
    return along


def sample_step(size: int) -> int:
    """The step between the sampled rows of a set of `size` places."""
    return max(1, size // SPLIT_SAMPLE)
