"""Sums and rows of all ranks, and their gradients back."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import pad

from fewkeys.core.inputs import Inputs
from fewkeys.core.precision import working
from fewkeys.core.totals import Totals
from fewkeys.distributed.agreement import agree
from fewkeys.distributed.communicator import Communicator


def gather(rows: Tensor, width: int, comm: Communicator) -> Tensor:
    """The rows (B, H, n_r, F) of all ranks r, (ranks, B, H, width, F), in working precision, with zeros at the end."""
    gathered: Tensor = _Gather.apply(pad(rows, (0, 0, 0, width - rows.shape[2])), comm)  # type: ignore[no-untyped-call]
    return gathered


class _Gather(torch.autograd.Function):
    """Backwards, each rank gets the sum of all ranks' gradients of its tensor."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, comm: Communicator) -> Tensor:
        ctx.comm, ctx.dtype = comm, rows.dtype
        return working(torch.stack(comm.all_gather(rows)))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        agree(ctx.comm, "backward of attention", {"gradient": [*gradient.shape, str(gradient.dtype)]})
        # Not a reduce-scatter, which would need half the bytes: gloo makes it of an all-reduce.
        return ctx.comm.all_reduce(gradient)[ctx.comm.rank].to(ctx.dtype), None


class OverRanks(Totals):
    """Totals over all ranks; each method is a collective. Gradients flow through sums."""

    def __init__(self, comm: Communicator) -> None:
        self.comm = comm

    def sum(self, part: Tensor) -> Tensor:
        total: Tensor = _Sum.apply(part, self.comm)  # type: ignore[no-untyped-call]
        return total

    def max(self, part: Tensor) -> Tensor:
        return self.comm.all_reduce(part, "max")

    def logsumexp(self, part: Tensor) -> Tensor:
        return torch.stack(self.comm.all_gather(part)).logsumexp(0)

    def counted(self, part: Tensor) -> tuple[Tensor, Tensor]:
        parts = torch.stack(self.comm.all_gather(part))
        return parts[: self.comm.rank].sum(0), parts.sum(0)

    def rows(self, part: Tensor) -> Tensor:
        return torch.cat(self.comm.all_gather_rows(part.movedim(2, 0))).movedim(0, 2)


class _Sum(torch.autograd.Function):
    """The sum over ranks. Every rank's loss depends on it, so gradients are summed over ranks, too."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, comm: Communicator) -> Tensor:
        ctx.comm = comm
        return comm.all_reduce(part)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return ctx.comm.all_reduce(gradient), None


def no_output(inputs: Inputs, parts: Sequence[Tensor | None]) -> Tensor:
    """The empty output of a rank without queries. It depends on the parts, whose backward pass other ranks wait for."""
    tie = sum((part.sum() for part in parts if part is not None), working(inputs.key).new_zeros(()))
    return inputs.query[..., :1].expand(-1, -1, -1, inputs.value_dim) * tie.to(inputs.query.dtype)
