"""What a rank must know of all earlier tokens to attend causally: of a size that the plan fixes."""

from __future__ import annotations

from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from fewkeys.distributed.communicator import Communicator
from fewkeys.past.running import RunningQueries
from fewkeys.past.summary import Summary


@dataclass(frozen=True, eq=False)
class Carry:
    """The past at position `place`, as the block that holds it sees it.

    near_key (B, Hkv, P, D), near_value (B, Hkv, P, Dv): the latest keys, those that a query at `place` may still see
    exactly, in the last places; what stands before them was never there. sink_key, sink_value (B, Hkv, S, .): the first
    keys of the sequence, zero where there are fewer. asked (B, Hkv, groups, block, D): the scaled queries of the
    block's tokens so far, at their places. summary: the stand-ins of everything before; queries: moments of all
    queries before the block.
    """

    place: int
    near_key: Tensor
    near_value: Tensor
    sink_key: Tensor
    sink_value: Tensor
    asked: Tensor
    summary: Summary
    queries: RunningQueries

    @staticmethod
    def empty(key: Tensor, value: Tensor, groups: int, *, near: int, sinks: int, block: int, means: int) -> Carry:
        """The past of the first token, for keys (B, Hkv, N, D) and values (B, Hkv, N, Dv) in working precision."""

        def rows(like: Tensor, count: int) -> Tensor:
            return like.new_zeros((*like.shape[:2], count, like.shape[-1]))

        return Carry(
            0,
            rows(key, near),
            rows(value, near),
            rows(key, sinks),
            rows(value, sinks),
            key.new_zeros((*key.shape[:2], groups, block, key.shape[-1])),
            Summary.empty(means, key, value),
            RunningQueries.empty(key),
        )


def hand_on(carry: Carry, comm: Communicator) -> Tensor:
    """Send the carry to the next rank. Returns a zero through which the next rank's gradients come back."""
    token: Tensor = _HandOn.apply(comm, *_tensors(carry))  # type: ignore[no-untyped-call]
    return token


def take_over(like: Carry, place: int, comm: Communicator, tie: Tensor) -> Carry:
    """The carry of the rank before, in the shapes of `like`; gradients go back to it where `tie` wants any."""
    found = list(_TakeOver.apply(comm, tie, *_tensors(like)))  # type: ignore[no-untyped-call]
    carry: Carry = replace(_with(like, iter(found)), place=place)
    return carry


class _HandOn(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, comm: Communicator, *tensors: Tensor) -> Tensor:
        ctx.comm, ctx.like = comm, [torch.empty_like(tensor) for tensor in tensors]
        comm.send(_packed(tensors), comm.rank + 1)
        return tensors[0].new_zeros(())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        packed = ctx.comm.receive(_packed(ctx.like), ctx.comm.rank + 1)
        return None, *_unpacked(packed, ctx.like)


class _TakeOver(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, comm: Communicator, tie: Tensor, *like: Tensor) -> tuple[Tensor, ...]:
        ctx.comm, ctx.tie, ctx.like = comm, torch.empty_like(tie), like
        return _unpacked(comm.receive(_packed(like), comm.rank - 1), like)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        ctx.comm.send(_packed(gradients), ctx.comm.rank - 1)
        return None, torch.zeros_like(ctx.tie), *(None for _ in ctx.like)


def _packed(tensors: Any) -> Tensor:
    return torch.cat([tensor.detach().flatten() for tensor in tensors])


def _unpacked(packed: Tensor, like: Any) -> tuple[Tensor, ...]:
    parts = packed.split([tensor.numel() for tensor in like])
    return tuple(part.view(tensor.shape).clone() for part, tensor in zip(parts, like, strict=True))


def _tensors(part: Any) -> list[Tensor]:
    """All tensors of a carry, in a fixed order; they share one dtype."""
    if isinstance(part, Tensor):
        return [part]
    return [t for field in fields(part) for t in _tensors(getattr(part, field.name))] if is_dataclass(part) else []


def _with(part: Any, tensors: Any) -> Any:
    """The same form with other tensors, taken in the order of `_tensors`."""
    if isinstance(part, Tensor):
        return next(tensors)
    if not is_dataclass(part):
        return part
    return replace(part, **{field.name: _with(getattr(part, field.name), tensors) for field in fields(part)})  # type: ignore[type-var]
