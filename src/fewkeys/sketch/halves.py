"""Rows in equal sets of similar ones: cut in the middle, and the halves again, where they differ most."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from fewkeys.core.rows import take

POWER, REFINE, SPLIT_SAMPLE = 2, 2, 128
"""Steps towards a direction, steps of 2-means from there, and about how many rows of a set they look at."""


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
        step = sample_step(size)
        along = direction(own[:, ::step], real[:, ::step], each)
        order = (own @ along.mT).squeeze(-1).masked_fill(~real, torch.inf).argsort(dim=-1, stable=True)
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


def direction(some: Tensor, there: Tensor, metric: Tensor) -> Tensor:
    """What is multiplied with rows (R, 1, F) for the numbers that order the sets, from samples (R, s, F) of them, of
    which those `there` (R, s) are real. `metric` (R, F, F).
    """
    total = there.sum(1)[:, None, None].clamp_min(1)
    some = (some - (some * there.unsqueeze(-1)).sum(1, keepdim=True) / total) * there.unsqueeze(-1)
    longest = some.square().sum(-1).argmax(1)
    along = some.gather(1, longest[:, None, None].expand(-1, 1, some.shape[-1])) @ metric
    for _ in range(POWER):
        moved = (some @ along.mT).mT @ some
        along = moved @ metric
        length = (moved * along).sum(-1, keepdim=True).clamp_min(0).sqrt()
        along = along / length.clamp_min(torch.finfo(some.dtype).tiny)
    for _ in range(REFINE):
        order = (some @ along.mT).squeeze(-1).masked_fill(~there, torch.inf).argsort(dim=-1, stable=True)
        left = order[:, : order.shape[1] // 2].unsqueeze(-1).expand(-1, -1, some.shape[-1])
        along = -some.gather(1, left).sum(1, keepdim=True) @ metric
    return along


def sample_step(size: int) -> int:
    """Every which row of a set of so many, fillings counted, its direction is found by."""
    return max(1, size // SPLIT_SAMPLE)
