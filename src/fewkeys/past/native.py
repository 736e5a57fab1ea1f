"""The compiled scan of a causal plan's past (`native/scan.h`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fewkeys.native.build import call, missing
from fewkeys.native.tensors import Rows, alike, dense, readable, struct, suits

_STATE = (
    *("rows", "excess", "size", "seen", "seen_key", "seen_value", "seen_square"),
    *("asked", "asked_total", "asked_square"),
)
_BY_STEP = ("rows_by", "excess_by", "size_by")
_MOVES = ("place", "coefficient")


class Steps(NamedTuple):
    """A `past.scan.Scan` in tensors.

    state: rows, excess and size of the stand-ins; count, key, value and square of the keys seen; count (B, Hkv), total
    and square of the queries. evicted: key, value, index and real of an `Evicted`.
    """

    state: tuple[Tensor, ...]
    query: Tensor
    answered: Tensor | None
    scale: float
    evicted: tuple[Tensor, Tensor, Tensor, Tensor]
    tilted: bool
    tilt: float
    lowest: float

    @property
    def suit(self) -> bool:
        """Whether kernels can take them, and nobody asks for gradients."""
        return suits(*self.state, self.query, *self.evicted[:2])

    @property
    def unsupported(self) -> str | None:
        """Why kernels cannot take them; gradients through the rows are no reason, `past.gradient` follows those."""
        if readable(*self.state, self.query, *self.evicted[:2]):
            return None
        key = self.evicted[0]
        return missing() or f"expected plain float32 or bfloat16 tensors on the CPU, got {key.dtype} on {key.device}"


class NativeScan:
    """The kernel's arguments for some steps, and the tensors that it reads and writes, which live as long as this."""

    def __init__(self, steps: Steps, states: Sequence[Tensor] = (), moves: Sequence[Tensor] = ()) -> None:
        self.steps = steps
        # They move in place, so these are copies.
        self.moved = [part.detach().clone(memory_format=torch.contiguous_format) for part in steps.state]
        query, (key, value) = dense(steps.query.detach()), alike(*(part.detach() for part in steps.evicted[:2]))
        index, real = (part.contiguous() for part in steps.evicted[2:])
        answered = None if steps.answered is None else steps.answered.contiguous()
        count, heads = index.shape[2], key.shape[1]
        held: dict[str, Tensor | None] = dict(zip(_STATE, self.moved, strict=True))
        held |= dict(zip(_BY_STEP, states, strict=False)) | dict(zip(_MOVES, moves, strict=False))
        held |= {"answered": answered, "index": index, "real": real}
        self.dtypes, self._alive = (key.dtype, query.dtype), (held, query, key, value)
        self.args = struct("Past")(
            **held,
            query=Rows.of(query),
            key=Rows.of(key),
            value=Rows.of(value),
            batch=key.shape[0],
            heads=heads,
            gqa_ratio=query.shape[1] // heads,
            dim=key.shape[3],
            value_dim=value.shape[3],
            count=self.moved[0].shape[2],
            steps=count,
            queries=query.shape[2] // count if count else 0,
            evicted=index.shape[3],
            tilted=steps.tilted,
            scale=steps.scale,
            tilt=steps.tilt,
            lowest=steps.lowest,
        )


def scan(steps: Steps, moves: Sequence[Tensor] = ()) -> tuple[list[Tensor], list[Tensor]]:
    """What `past.scan.Scan` promises: rows, excess and size by step, and the state at the end.

    `moves`: place, int64, and coefficient (B, Hkv, steps, M + E), to be written if given: at every step, old stand-in
    or key i becomes `coefficient_i` of the mean at place `place_i`; what is not there has coefficient zero.
    """
    count = steps.evicted[2].shape[2]
    states = [part.new_empty((*part.shape[:2], count + 1, *part.shape[2:])) for part in steps.state[:3]]
    problem = NativeScan(steps, states, moves)
    call("fewkeys_scan", problem.args, *problem.dtypes)
    return states, problem.moved
