"""The past of a causal plan moves on, block by block (`past.cpp`); without gradient."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fewkeys.native.build import library
from fewkeys.native.tensors import Rows, alike, dense

_STATE = ("rows", "excess", "size", "seen", "seen_key", "seen_value", "seen_square")
_ASKED = ("asked", "asked_total", "asked_square")
_BY_STEP = ("rows_by", "excess_by", "size_by")
_SIZES = ("batch", "heads", "groups", "dim", "value_dim", "count", "steps", "queries", "leaving", "rounds", "tilted")


class _Past(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in (*_STATE, *_ASKED, *_BY_STEP)),
        ("query", Rows),
        ("answered", ctypes.c_void_p),
        ("key", Rows),
        ("value", Rows),
        ("index", ctypes.c_void_p),
        ("real", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in _SIZES),
        *((name, ctypes.c_float) for name in ("scale", "tilt", "lowest")),
    )


@dataclass(frozen=True, eq=False)
class Move:
    """Which rows each step takes up, as `sketch.past.Leaving` says, and how stand-ins are merged."""

    key: Tensor
    value: Tensor
    index: Tensor
    real: Tensor
    tilted: bool
    tilt: float
    lowest: float
    rounds: int


def walk(
    state: Sequence[Tensor], query: Tensor, answered: Tensor | None, scale: float, move: Move
) -> tuple[list[Tensor], list[Tensor]]:
    """What `sketch.past.walk` says, on the tensors of a `Past`: those by step, and those at the end.

    `state`: rows, excess and size of the stand-ins; count, key, value and square of the keys seen; count (B, Hkv),
    total and square of the queries.
    """
    # They move in place, so these are copies.
    moved = [part.detach().clone(memory_format=torch.contiguous_format) for part in state]
    query, (key, value) = dense(query), alike(move.key.detach(), move.value.detach())
    index, real = move.index.contiguous(), move.real.contiguous()
    answered = None if answered is None else answered.contiguous()
    steps, heads = index.shape[2], key.shape[1]
    by_step = [part.new_empty((*part.shape[:2], steps + 1, *part.shape[2:])) for part in moved[:3]]
    sizes = (
        key.shape[0],
        heads,
        query.shape[1] // heads,
        key.shape[3],
        value.shape[3],
        moved[0].shape[2],
        steps,
        query.shape[2] // steps if steps else 0,
        index.shape[3],
        move.rounds,
        int(move.tilted),
    )
    problem = _Past(
        *(part.data_ptr() for part in (*moved, *by_step)),
        Rows.of(query),
        None if answered is None else answered.data_ptr(),
        Rows.of(key),
        Rows.of(value),
        index.data_ptr(),
        real.data_ptr(),
        *sizes,
        scale,
        move.tilt,
        move.lowest,
    )
    kinds = (ctypes.c_int(x.dtype == torch.bfloat16) for x in (key, query))
    library().fewkeys_walk(ctypes.byref(problem), *kinds, ctypes.c_int(torch.get_num_threads()))
    return by_step, moved
