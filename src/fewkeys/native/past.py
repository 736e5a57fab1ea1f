"""The past of a causal plan moves on, block by block (`past.cpp`); without gradient."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from fewkeys.native.build import call
from fewkeys.native.tensors import Rows, alike, dense, pointers

_STATE = (
    *("rows", "excess", "size", "seen", "seen_key", "seen_value", "seen_square"),
    *("asked", "asked_total", "asked_square"),
)
_BY_STEP = ("rows_by", "excess_by", "size_by")
_SIZES = ("batch", "heads", "groups", "dim", "value_dim", "count", "steps", "queries", "leaving", "rounds", "tilted")


class _Past(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in (*_STATE, *_BY_STEP)),
        ("query", Rows),
        ("answered", ctypes.c_void_p),
        ("key", Rows),
        ("value", Rows),
        ("index", ctypes.c_void_p),
        ("real", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in _SIZES),
        *((name, ctypes.c_float) for name in ("scale", "tilt", "lowest")),
    )


def walk(
    state: Sequence[Tensor],
    query: Tensor,
    answered: Tensor | None,
    scale: float,
    leaving: Sequence[Tensor],
    *,
    tilted: bool,
    tilt: float,
    lowest: float,
    rounds: int,
) -> tuple[list[Tensor], list[Tensor]]:
    """What `sketch.past.walk` says, on the tensors of a `Past`: those by step, and those at the end.

    `state`: rows, excess and size of the stand-ins; count, key, value and square of the keys seen; count (B, Hkv),
    total and square of the queries. `leaving`: key, value, index and real of a `Leaving`.
    """
    # They move in place, so these are copies.
    moved = [part.detach().clone(memory_format=torch.contiguous_format) for part in state]
    query, (key, value) = dense(query), alike(*(part.detach() for part in leaving[:2]))
    index, real = (part.contiguous() for part in leaving[2:])
    steps, heads = index.shape[2], key.shape[1]
    by_step = [part.new_empty((*part.shape[:2], steps + 1, *part.shape[2:])) for part in moved[:3]]
    held: dict[str, Tensor | None] = dict(zip((*_STATE, *_BY_STEP), (*moved, *by_step), strict=True))
    held |= {"answered": None if answered is None else answered.contiguous(), "index": index, "real": real}
    problem = _Past(
        **pointers(held),
        query=Rows.of(query),
        key=Rows.of(key),
        value=Rows.of(value),
        batch=key.shape[0],
        heads=heads,
        groups=query.shape[1] // heads,
        dim=key.shape[3],
        value_dim=value.shape[3],
        count=moved[0].shape[2],
        steps=steps,
        queries=query.shape[2] // steps if steps else 0,
        leaving=index.shape[3],
        rounds=rounds,
        tilted=tilted,
        scale=scale,
        tilt=tilt,
        lowest=lowest,
    )
    call("fewkeys_walk", problem, key.dtype, query.dtype)
    return by_step, moved
