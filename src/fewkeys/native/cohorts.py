"""Cohorts of queries and what they see of the keys, by the compiled kernels (`native/cohorts.h`); without gradient."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from fewkeys.native.build import call
from fewkeys.native.tensors import Rows, alike, pointers

LANES = 32
"""Cohorts whose weights of a key are added up by the kernel."""
_POINTER, _SIZE = ctypes.c_void_p, ctypes.c_int64


class _Halves(ctypes.Structure):
    _fields_ = (
        *((name, _POINTER) for name in ("rows", "place")),
        *((name, _SIZE) for name in ("sets", "rows_each", "dim", "count")),
    )


class _Best(ctypes.Structure):
    _fields_ = (
        ("key", Rows),
        *((name, _POINTER) for name in ("mean", "offset", "index", "used")),
        *((name, _SIZE) for name in ("batch", "heads", "keys", "dim", "cohorts", "count")),
    )


class _Tilts(ctypes.Structure):
    _fields_ = (
        *((name, Rows) for name in ("key", "value")),
        *((name, _POINTER) for name in ("real", "label", "own", "middle", "mean", "level", "index", "used")),
        *((name, _POINTER) for name in ("mass", "energy", "rows", "weight")),
        *((name, _SIZE) for name in ("batch", "heads", "keys", "dim", "value_dim", "cohorts", "count", "kept")),
        *((name, ctypes.c_float) for name in ("tilt", "largest")),
    )


def halve(rows: Tensor, count: int) -> Tensor:
    """What `sketch.cohorts.split` promises, of float32 rows (R, m, F)."""
    sets, many, dim = rows.shape
    rows, each = rows.contiguous(), -(-many // count)
    place = torch.empty((sets, count, each), dtype=torch.int64, device="cpu")
    told = pointers({"rows": rows, "place": place})
    call("fewkeys_halve", _Halves(**told, sets=sets, rows_each=many, dim=dim, count=count))
    return place


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
    call("fewkeys_best", _Best(key=Rows.of(key), **told, **sizes), key.dtype)
    return index, used.bool()


def tilt(
    key: Tensor, value: Tensor, told: dict[str, Tensor | None], *, tilt: float, largest: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Mass, energy, rows and weight of `sketch.tilted.Tilted`. `told`: what `Tilts` in `problems.h` reads."""
    key, value = alike(key, value)
    held = {name: None if part is None else part.contiguous() for name, part in told.items()}
    level, index = held["level"], held["index"]
    if level is None or index is None:
        raise ValueError("told: expected the level of every cluster and the keys kept, got none")
    batch, heads, cohorts, count = level.shape
    dim, value_dim = key.shape[3], value.shape[3]
    mass, energy = level.new_empty((2, *level.shape)).unbind()
    rows = level.new_empty((*level.shape, dim + value_dim))
    weight = level.new_zeros((batch, heads, -(-cohorts // LANES), key.shape[2]))
    held |= {"mass": mass, "energy": energy, "rows": rows, "weight": weight}
    sizes = {"batch": batch, "heads": heads, "keys": key.shape[2], "dim": dim, "value_dim": value_dim}
    sizes |= {"cohorts": cohorts, "count": count, "kept": index.shape[3]}
    problem = _Tilts(key=Rows.of(key), value=Rows.of(value), **pointers(held), **sizes, tilt=tilt, largest=largest)
    call("fewkeys_tilt", problem, key.dtype)
    return mass, energy, rows, weight.sum(2)
