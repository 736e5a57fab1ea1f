"""Sends the state of the past from rank to rank, in tensors of a size that the plan fixes, and gradients back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import pad

from fewkeys.distributed.communicator import Communicator
from fewkeys.memory.parts import Parts
from fewkeys.past.state import State
from fewkeys.past.tokens import Stretch


def hand_on(state: State, parts: Parts, comm: Communicator) -> Tensor:
    """Send the state to the next rank. Returns a zero through which the next rank's gradients come back."""
    token: Tensor = _HandOn.apply(comm, *_numbers(state, parts).values())  # type: ignore[no-untyped-call]
    return token


def take_over(like: State, parts: Parts, place: int, comm: Communicator, tie: Tensor) -> State:
    """The state of the rank before, which stands at position `place`; `like` is an empty one.

    Gradients go back to that rank where `tie` wants any.
    """
    numbers = _numbers(like, parts)
    tensors = _TakeOver.apply(comm, tie, *numbers.values())  # type: ignore[no-untyped-call]
    return _state(like, dict(zip(numbers, tensors, strict=True)), parts, place)


def _numbers(state: State, parts: Parts) -> dict[str, Tensor]:
    """The numbers of a state, which share one dtype, filled with zeros up to the most that such parts can hold.

    The latest near tokens stand last, sinks and queries first. All are real, so the position tells which these are.
    """
    reach = 0 if parts.recent is None else parts.recent.size * parts.recent.blocks
    held = {name: tensor for name, tensor in state.tensors().items() if tensor.is_floating_point()}
    for name in ("near.key", "near.value"):
        held[name] = pad(held[name], (0, 0, reach - state.near.count, 0))
    for name, most in (("sinks.key", parts.sinks), ("sinks.value", parts.sinks), ("asked", parts.unit)):
        held[name] = pad(held[name], (0, 0, 0, most - held[name].shape[-2]))
    return held


def _state(like: State, numbers: dict[str, Tensor], parts: Parts, place: int) -> State:
    """The state at position `place`, in the dtype and layout of `like`, of such numbers."""
    moved = max(0, place - 1) // parts.unit * parts.unit
    first = parts.needed_from(moved)
    near = (rows[:, :, rows.shape[2] - (place - first) :] for rows in (numbers["near.key"], numbers["near.value"]))
    sinks = (rows[:, :, :place] for rows in (numbers["sinks.key"], numbers["sinks.value"]))
    asked = numbers["asked"][:, :, :, : place - moved]
    answered = torch.ones((asked.shape[0], asked.shape[3]), dtype=torch.bool, device=asked.device)
    state = like.with_tensors({**like.tensors(), **numbers, "asked": asked, "answered": answered})
    return replace(state, moved=moved, near=Stretch(first, *near), sinks=Stretch(0, *sinks))


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


def _packed(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([tensor.detach().flatten() for tensor in tensors])


def _unpacked(packed: Tensor, like: Sequence[Tensor]) -> tuple[Tensor, ...]:
    parts = packed.split([tensor.numel() for tensor in like])
    return tuple(part.view(tensor.shape).clone() for part, tensor in zip(parts, like, strict=True))
