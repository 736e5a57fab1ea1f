"""Cohorts of queries and what they see of the keys, by the compiled kernels (`native/cohorts.h`); without gradient."""

from __future__ import annotations

import torch
from torch import Tensor

from fewkeys.native.build import call
from fewkeys.native.tensors import Rows, alike, pointers, struct

LANES = 32
"""Cohorts whose weights of a key are added up by the kernel."""


def halve(rows: Tensor, metric: Tensor, count: int, step: int) -> tuple[Tensor, Tensor, Tensor]:
    """Places (R, count, M), means (R, count, F) and covariance (R, F, F) of float32 rows (R, m, F): what
    `sketch.cohorts.split` and `sketch.cohorts.described` promise.
    """
    sets, many, dim = rows.shape
    place = torch.empty((sets, count, -(-many // count)), dtype=torch.int64, device="cpu")
    found = {"place": place, "mean": rows.new_empty((sets, count, dim)), "within": rows.new_empty((sets, dim, dim))}
    held = {"rows": rows.contiguous(), "metric": metric.contiguous(), **found}
    sizes = {"sets": sets, "rows_each": many, "dim": dim, "count": count, "step": step}
    call("fewkeys_halve", struct("Halves")(**pointers(held), **sizes))
    return found["place"], found["mean"], found["within"]


def best(key: Tensor, mean: Tensor, offset: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` keys of largest `mean_h . key_j + offset_j` of every cohort, mean (B, H', H, D), offset (B, H', N):
    places (B, H', H, count), in order, and which of them are used.
    """
    (key,), mean, offset = alike(key), mean.contiguous(), offset.contiguous()
    batch, heads, keys, dim = key.shape
    shape = (*mean.shape[:3], count)
    index, used = (
        torch.empty(shape, dtype=torch.int64, device="cpu"),
        torch.empty(shape, dtype=torch.uint8, device="cpu"),
    )
    told = pointers({"mean": mean, "offset": offset, "index": index, "used": used})
    sizes = {"batch": batch, "heads": heads, "keys": keys, "dim": dim, "cohorts": mean.shape[2], "count": count}
    call("fewkeys_best", struct("Best")(key=Rows.of(key), **told, **sizes), key.dtype)
    return index, used.bool()


def tilt(
    key: Tensor, value: Tensor, told: dict[str, Tensor | None], count: int, *, tilt: float, largest: float
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Mass, energy, rows, weight and importance of `sketch.tilted.Tilted`, for `count` clusters. `told`: what `Tilts`
    of `problems.h` reads.
    """
    key, value = alike(key, value)
    held = {name: None if part is None else part.contiguous() for name, part in told.items()}
    mean, index = held["mean"], held["index"]
    if mean is None or index is None:
        raise ValueError("told: expected the mean of every cohort and the keys kept, got none")
    batch, heads, cohorts, dim = mean.shape
    value_dim = value.shape[3]
    mass, energy, level = mean.new_empty((3, batch, heads, cohorts, count)).unbind()
    rows = mean.new_empty((*level.shape, dim + value_dim))
    weight = mean.new_zeros((batch, heads, -(-cohorts // LANES), key.shape[2]))
    held |= {"mass": mass, "energy": energy, "rows": rows, "weight": weight, "level": level}
    sizes = {"batch": batch, "heads": heads, "keys": key.shape[2], "dim": dim, "value_dim": value_dim}
    sizes |= {"cohorts": cohorts, "count": count, "kept": index.shape[3]}
    problem = struct("Tilts")(
        key=Rows.of(key), value=Rows.of(value), **pointers(held), **sizes, tilt=tilt, largest=largest
    )
    call("fewkeys_tilt", problem, key.dtype)
    return mass, energy, rows, weight.sum(2), level


def cohort_means(told: dict[str, Tensor], rank: int, steps: int, **numbers: float) -> dict[str, Tensor]:
    """`key`, `value` and `bias` of the stand-ins of every cohort, as `rest.base.StandIns` has them; with a rank,
    `factor`, `left`, `right` and `bounds`, too. `told`: what `CohortStandIns` in `problems.h` reads, in float32.
    """
    held = {name: part.contiguous() for name, part in told.items()}
    rows, together = held["rows"], held["together"]
    batch, heads, cohorts, count, _ = rows.shape
    dim, value_dim = together.shape[2:]
    shapes = {"key": (count, dim), "value": (count, value_dim), "bias": (count,), "factor": (count,)}
    shapes |= {"left": (dim, rank), "right": (rank, value_dim), "bounds": (2, rank)}
    found = {name: rows.new_empty((batch, heads * cohorts, *shape)) for name, shape in shapes.items()}
    sizes = {"heads": batch * heads, "cohorts": cohorts, "count": count, "dim": dim, "value_dim": value_dim}
    problem = struct("CohortStandIns")(**pointers(held | found), **sizes, rank=rank, steps=steps, **numbers)
    call("fewkeys_cohort_means", problem)
    return found if rank else {name: found[name] for name in ("key", "value", "bias")}
