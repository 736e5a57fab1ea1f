"""How stand-ins of the past depend on the keys that they stand for.

What merges, and with which weights, is a choice that carries no gradient; given it, every step is linear: the old
stand-ins and the keys that it absorbs go to the places p_i, with coefficients a_i of the mean there,

    row'_c = sum_{i: p_i = c} a_i row_i,     so     gradient_i = a_i gradient'_(p_i).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fewkeys.past import native


def scan_with_gradient(steps: native.Steps) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """`native.scan`, where gradients flow through the rows to the rows at the beginning, the keys and the values."""
    scanned = _Scanned.apply(steps.state[0], *steps.evicted[:2], steps)  # type: ignore[no-untyped-call]
    return scanned[:3], scanned[3:]


class _Scanned(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, key: Tensor, value: Tensor, steps: native.Steps) -> tuple[Tensor, ...]:
        index = steps.evicted[2]
        both = (*index.shape[:3], rows.shape[2] + index.shape[3])
        place, coefficient = index.new_empty(both), rows.new_empty(both, dtype=torch.float32)
        states, last = native.scan(steps, (place, coefficient))
        ctx.save_for_backward(place, coefficient, index)
        ctx.shape, ctx.dtypes = key.shape, (rows.dtype, key.dtype, value.dtype)
        ctx.mark_non_differentiable(*states[1:], *last[1:])
        return (*states, *last)

    @staticmethod
    def backward(ctx: Any, states: Tensor, _excess: Tensor, _size: Tensor, last: Tensor, *_: Tensor) -> Any:
        place, coefficient, index = ctx.saved_tensors
        gradients = _scan_back(states, last, place, coefficient, index, *ctx.shape[2:])
        return (*(part.to(dtype) for part, dtype in zip(gradients, ctx.dtypes, strict=True)), None)


def _scan_back(
    states: Tensor, last: Tensor, place: Tensor, coefficient: Tensor, index: Tensor, keys: int, dim: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of the rows at the beginning, of `keys` keys of `dim` dimensions and of the values.

    states (B, Hkv, steps + 1, M, D + Dv) and last (B, Hkv, M, D + Dv): the gradients of the outputs. `place` and
    `coefficient`: the moves of `native.scan`; index (B, Hkv, steps, E): the keys that every step absorbs.
    """
    count, wide = last.shape[2:]
    *earlier, flow = states.unbind(2)
    flow, fresh = flow + last, []
    for step in reversed(range(place.shape[2])):
        moved = flow.gather(2, place[:, :, step].unsqueeze(-1).expand(-1, -1, -1, wide))
        moved = moved * coefficient[:, :, step].unsqueeze(-1)
        fresh.append(moved[:, :, count:])
        flow = moved[:, :, :count] + earlier[step]
    new = torch.stack(fresh[::-1], 2).flatten(2, 3) if fresh else flow[:, :, :0]
    index = index.flatten(2).unsqueeze(-1).expand(*new.shape[:3], wide)
    key, value = new.new_zeros((*new.shape[:2], keys, wide)).scatter_add(2, index, new).split([dim, wide - dim], -1)
    return flow, key, value
