"""The past of a causal plan moves on, block by block, and is followed back (`scan.h`)."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fewkeys.native.build import call
from fewkeys.native.tensors import Rows, alike, dense, pointers, readable, suits

_STATE = (
    *("rows", "excess", "size", "seen", "seen_key", "seen_value", "seen_square"),
    *("asked", "asked_total", "asked_square"),
)
_BY_STEP = ("rows_by", "excess_by", "size_by")
_MOVES = ("place", "share")
_SIZES = ("batch", "heads", "groups", "dim", "value_dim", "count", "steps", "queries", "leaving", "tilted")


class Steps(NamedTuple):
    """What moves a past on, as `sketch.past.Walk` says it in tensors.

    state: rows, excess and size of the stand-ins; count, key, value and square of the keys seen; count (B, Hkv), total
    and square of the queries. leaving: key, value, index and real of a `Leaving`.
    """

    state: tuple[Tensor, ...]
    query: Tensor
    answered: Tensor | None
    scale: float
    leaving: tuple[Tensor, Tensor, Tensor, Tensor]
    tilted: bool
    tilt: float
    lowest: float

    @property
    def suit(self) -> bool:
        """Whether kernels can take them."""
        return suits(*self.state, self.query, *self.leaving[:2])

    @property
    def readable(self) -> bool:
        """Whether kernels can take them where gradients through the rows are followed by hand."""
        return readable(*self.state, self.query, *self.leaving[:2])


class _Past(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in (*_STATE, *_BY_STEP)),
        *((name, ctypes.c_void_p) for name in _MOVES),
        ("query", Rows),
        ("answered", ctypes.c_void_p),
        ("key", Rows),
        ("value", Rows),
        ("index", ctypes.c_void_p),
        ("real", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in _SIZES),
        *((name, ctypes.c_float) for name in ("scale", "tilt", "lowest")),
    )


class _PastBack(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("rows_by", "last", *_MOVES, "index", "rows", "key", "value")),
        *((name, ctypes.c_int64) for name in ("heads", "keys", "dim", "value_dim", "count", "steps", "leaving")),
    )


class Problem:
    """Steps as the kernels are told of them, and the tensors that they read and write, which live as long as this."""

    def __init__(self, steps: Steps, by_step: Sequence[Tensor] = (), moves: Sequence[Tensor] = ()) -> None:
        self.steps = steps
        # They move in place, so these are copies.
        self.moved = [part.detach().clone(memory_format=torch.contiguous_format) for part in steps.state]
        query, (key, value) = dense(steps.query.detach()), alike(*(part.detach() for part in steps.leaving[:2]))
        index, real = (part.contiguous() for part in steps.leaving[2:])
        answered = None if steps.answered is None else steps.answered.contiguous()
        count, heads = index.shape[2], key.shape[1]
        held: dict[str, Tensor | None] = dict(zip(_STATE, self.moved, strict=True))
        held |= dict(zip(_BY_STEP, by_step, strict=False)) | dict(zip(_MOVES, moves, strict=False))
        held |= {"answered": answered, "index": index, "real": real}
        self.dtypes, self._alive = (key.dtype, query.dtype), (held, query, key, value)
        self.told = _Past(
            **pointers(held),
            query=Rows.of(query),
            key=Rows.of(key),
            value=Rows.of(value),
            batch=key.shape[0],
            heads=heads,
            groups=query.shape[1] // heads,
            dim=key.shape[3],
            value_dim=value.shape[3],
            count=self.moved[0].shape[2],
            steps=count,
            queries=query.shape[2] // count if count else 0,
            leaving=index.shape[3],
            tilted=steps.tilted,
            scale=steps.scale,
            tilt=steps.tilt,
            lowest=steps.lowest,
        )


def walk(steps: Steps, moves: Sequence[Tensor] = ()) -> tuple[list[Tensor], list[Tensor]]:
    """What `sketch.past.Walk` promises: rows, excess and size by step, and the state at the end.

    `moves`: place, int64, and share (B, Hkv, steps, M + E), to be written if given: at every step, old stand-in or key
    i becomes `share_i` of the mean at place `place_i`; what is not there has share zero.
    """
    count = steps.leaving[2].shape[2]
    by_step = [part.new_empty((*part.shape[:2], count + 1, *part.shape[2:])) for part in steps.state[:3]]
    problem = Problem(steps, by_step, moves)
    call("fewkeys_scan", problem.told, *problem.dtypes)
    return by_step, problem.moved


def walk_back(
    by_step: Tensor, last: Tensor, place: Tensor, share: Tensor, index: Tensor, keys: int, dim: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of the rows at the beginning, of `keys` keys of `dim` dimensions and of the values, all float32.

    by_step (B, Hkv, steps + 1, M, D + Dv) and last (B, Hkv, M, D + Dv): the gradients that come. `place` and `share`:
    the moves of `walk`; index (B, Hkv, steps, E): the keys that every step takes up.
    """
    *head, count, wide = last.shape
    rows, key = torch.empty_like(last, memory_format=torch.contiguous_format), last.new_zeros((*head, keys, dim))
    value = last.new_zeros((*head, keys, wide - dim))
    given = (by_step.contiguous(), last.contiguous(), place, share, index.contiguous())
    told = _PastBack(
        **pointers(dict(zip(("rows_by", "last", *_MOVES, "index"), given, strict=True))),
        **pointers({"rows": rows, "key": key, "value": value}),
        heads=head[0] * head[1],
        keys=keys,
        dim=dim,
        value_dim=wide - dim,
        count=count,
        steps=index.shape[2],
        leaving=index.shape[3],
    )
    call("fewkeys_scan_back", told)
    return rows, key, value
