"""Cohorts of queries and their statistics of the keys (`native/cohorts.h`, `tilts.h`, `cohort_means.h`)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fewkeys.native.build import call
from fewkeys.native.tensors import KernelArgs, Rows, alike, dense, struct


def halve(
    rows: Tensor, key: Tensor, real: Tensor | None, count: int, *, scale: float, **steps: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Places (B, H, count, M), means (B, H, count, F) and covariance (B, H, F, F) of float32 rows (B, H, m, F), times
    the scale: what `sketch.halves.split` and `described` promise. The metric is that of keys (B, H, M', F), of which
    `real` (B, M') count.
    """
    batch, heads, many, dim = rows.shape
    sets, key = rows.shape[:2], dense(key)
    place = torch.empty((*sets, count, -(-many // count)), dtype=torch.int64, device="cpu")
    output = {"place": place, "mean": rows.new_empty((*sets, count, dim)), "within": rows.new_empty((*sets, dim, dim))}
    sizes = {"sets": batch * heads, "heads": heads, "rows_each": many, "keys": key.shape[2], "dim": dim, "count": count}
    held = {"rows": rows, "real": real, **output}
    call("fewkeys_halve", struct("Halves")(key=Rows.of(key), **held, **sizes, **steps, scale=scale))
    return place, output["mean"], output["within"]


def best(key: Tensor, facts: dict[str, Any], count: int, *, near: float, power: float) -> tuple[Tensor, Tensor, Tensor]:
    """The `count` best keys of every cohort: places (B, H', H, count), in order, which of them are used, and half the
    variance of every key's scores (B, H', N): what `select.outliers` promises. `facts`: the fields that `Best` of
    `problems.h` reads, by name.
    """
    (key,), mean = alike(key), facts["mean"]
    batch, heads, keys, dim = key.shape
    shape = (*mean.shape[:3], count)
    index, used = (torch.empty(shape, dtype=dtype, device="cpu") for dtype in (torch.int64, torch.bool))
    half_variance = mean.new_empty(key.shape[:3])
    held = {**facts, "index": index, "used": used, "half_variance": half_variance}
    sizes = {"batch": batch, "heads": heads, "keys": keys, "dim": dim, "cohorts": mean.shape[2], "count": count}
    call("fewkeys_best", struct("Best")(key=Rows.of(key), **held, **sizes, near=near, power=power), key.dtype)
    return index, used, half_variance


def tilt(
    key: Tensor, value: Tensor, facts: dict[str, Any], count: int, together: bool, **numbers: float
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor | None]:
    """Mass, energy, size, key, value, level and, where it is asked for, `together` of `sketch.tilted.Tilted`, for
    `count` clusters. `facts` and `numbers`: the fields that `Tilts` of `problems.h` reads, by name.
    """
    (key, value), mean = alike(key, value), facts["mean"]
    mass, energy, size, level = mean.new_empty((4, *mean.shape[:3], count)).unbind()
    key_sum, value_sum = (mean.new_empty((*level.shape, rows.shape[3])) for rows in (key, value))
    products = mean.new_empty((*mean.shape[:2], key.shape[3], value.shape[3])) if together else None
    sums = {"mass": mass, "energy": energy, "size": size, "key_sum": key_sum, "value_sum": value_sum, "level": level}
    call("fewkeys_tilt", _tilts(key, value, facts | sums | {"together": products}, numbers), key.dtype)
    return mass, energy, size, key_sum, value_sum, level, products


def tilt_back(
    key: Tensor,
    value: Tensor,
    facts: dict[str, Any],
    gradients: tuple[Tensor, Tensor, Tensor | None],
    **numbers: float,
) -> tuple[Tensor, Tensor]:
    """The gradients of keys and values, float32, from those of both sums and `together`. `facts`: as in `tilt`, and the
    `level` that it returns.
    """
    key, value = alike(key, value)
    of_sums = dict(zip(("key_sum", "value_sum", "together"), gradients, strict=True))
    output = {name: rows.new_zeros(rows.shape, dtype=torch.float32) for name, rows in (("key", key), ("value", value))}
    args = struct("TiltsBack")(of=_tilts(key, value, facts, numbers), **of_sums, **output)
    call("fewkeys_tilt_back", args, key.dtype)
    return output["key"], output["value"]


def _tilts(key: Tensor, value: Tensor, held: dict[str, Any], numbers: dict[str, float]) -> KernelArgs:
    batch, heads, keys, dim = key.shape
    sizes = {"batch": batch, "heads": heads, "keys": keys, "dim": dim, "value_dim": value.shape[3]}
    sizes |= {"cohorts": held["mean"].shape[2], "count": held["level"].shape[3], "kept": held["index"].shape[3]}
    return struct("Tilts")(key=Rows.of(key), value=Rows.of(value), **held, **sizes, **numbers)


def cohort_means(tensors: dict[str, Tensor], rank: int, steps: int, **numbers: float) -> dict[str, Tensor]:
    """`key`, `value` and `bias` of the stand-ins of every cohort, as `rest.base.CohortStandIns` has them; with a rank,
    `factor`, `left`, `right` and `bounds`, too. `tensors`: what `CohortStandIns` in `problems.h` reads, in float32. The
    sums `key` and `value` are overwritten.
    """
    dense = {name: part.contiguous() for name, part in tensors.items()}
    batch, heads, cohorts, count, dim = dense["key"].shape
    value_dim = dense["value"].shape[4]
    shapes: dict[str, tuple[int, ...]] = {"bias": (count,)}
    if rank:
        shapes |= {"factor": (count,), "left": (dim, rank), "right": (rank, value_dim), "bounds": (2, rank)}
    output = {name: dense["mass"].new_empty((batch, heads, cohorts, *shape)) for name, shape in shapes.items()}
    sizes = {"heads": batch * heads, "cohorts": cohorts, "count": count, "dim": dim, "value_dim": value_dim}
    problem = struct("CohortStandIns")(**(dense | output), **sizes, rank=rank, steps=steps, **numbers)
    call("fewkeys_cohort_means", problem)
    return output | {"key": dense["key"], "value": dense["value"]}
