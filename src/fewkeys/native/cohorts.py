"""Cohorts of queries and their statistics of the keys (`native/cohorts.h`, `tilts.h`, `cohort_means.h`)."""

from typing import Any

import torch
from torch import Tensor

from fewkeys.native.build import call
from fewkeys.native.tensors import alike, sized, struct


def halve(
    rows: Tensor, key: Tensor, real: Tensor | None, count: int, *, scale: float, **steps: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Places (B, H, count, M), means (B, H, count, F) and covariance (B, H, F, F) of float32 rows (B, H, m, F), times
    the scale, as `sketch.halves.split` and `described` have them. The metric is that of keys (B, H, M', F), of which
    `real` (B, M') count.
    """
    (batch, heads, total, dim), sets = rows.shape, rows.shape[:2]
    place = rows.new_empty((*sets, count, -(-total // count)), dtype=torch.int64)
    mean, within = rows.new_empty((*sets, count, dim)), rows.new_empty((*sets, dim, dim))
    tensors = {"rows": rows, "key": key, "real": real, "place": place, "mean": mean, "within": within}
    sizes = {"heads": batch * heads, "rows_each": total, "keys": key.shape[2], "dim": dim, "count": count}
    call("fewkeys_halve", struct("Halves")(**tensors, **sizes, **steps, scale=scale))
    return place, mean, within


def best(key: Tensor, facts: dict[str, Any], count: int, *, near: float, power: float) -> tuple[Tensor, Tensor, Tensor]:
    """The `count` best keys of every cohort: places (B, H', H, count), in order, which of them are used, and half the
    variance of every key's scores (B, H', N), as `select.outliers` has them. `facts`: fields of `Best`.
    """
    mean = facts["mean"]
    index, used = (mean.new_empty((*mean.shape[:3], count), dtype=dtype) for dtype in (torch.int64, torch.bool))
    half_variance = facts["half_variance"] if "half_variance" in facts else mean.new_empty(key.shape[:3])
    tensors = {**facts, "index": index, "used": used, "half_variance": half_variance}
    numbers = {"cohorts": mean.shape[2], "count": count, "near": near, "power": power}
    call("fewkeys_best", struct("Best")(**sized(key), **tensors, **numbers), key.dtype)
    return index, used, half_variance


def tilt(
    key: Tensor, value: Tensor, facts: dict[str, Any], count: int, together: bool, **numbers: float
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor | None]:
    """Mass, energy, size, key, value, level and, where it is asked for, `together` of `sketch.tilted.Tilted`, for
    `count` clusters. `facts` and `numbers`: fields of `Tilts`.
    """
    (key, value), mean = alike(key, value), facts["mean"]
    mass, energy, size, level = mean.new_empty((4, *mean.shape[:3], count)).unbind()
    key_sum, value_sum = (mean.new_empty((*level.shape, rows.shape[3])) for rows in (key, value))
    products = mean.new_empty((*mean.shape[:2], key.shape[3], value.shape[3])) if together else None
    sums = {"mass": mass, "energy": energy, "size": size, "key_sum": key_sum, "value_sum": value_sum, "level": level}
    tensors = {**facts, **sums, "together": products}
    sizes = {"cohorts": mean.shape[2], "kept": facts["index"].shape[3], "count": count}
    call("fewkeys_tilt", struct("Tilts")(**sized(key, value), **tensors, **sizes, **numbers), key.dtype)
    return mass, energy, size, key_sum, value_sum, level, products


def cohort_means(tensors: dict[str, Tensor], rank: int, steps: int, **numbers: float) -> dict[str, Tensor]:
    """`key`, `value` and `bias` of the stand-ins of every cohort, as `rest.base.StandIns` has them; with a rank,
    `factor`, `left`, `right` and `bounds`, too. `tensors`: fields of `StandIns` of `problems.h`. The sums `key`
    and `value` are overwritten.
    """
    key, value = tensors["key"], tensors["value"]
    batch, heads, cohorts, count, dim = key.shape
    value_dim = value.shape[4]
    shapes: dict[str, tuple[int, ...]] = {"bias": (count,)}
    if rank:
        shapes |= {"factor": (count,), "left": (dim, rank), "right": (rank, value_dim), "bounds": (2, rank)}
    output = {name: key.new_empty((batch, heads, cohorts, *shape)) for name, shape in shapes.items()}
    sizes = {"heads": batch * heads, "cohorts": cohorts, "count": count, "dim": dim, "value_dim": value_dim}
    args = struct("StandIns")(**tensors, **output, **sizes, rank=rank, steps=steps, **numbers)
    call("fewkeys_cohort_means", args)
    return output | {"key": key, "value": value}
