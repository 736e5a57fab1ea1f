"""Rows of all ranks, and their gradients back."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import pad

from fewkeys.core.precision import working
from fewkeys.distributed.agreement import agree
from fewkeys.distributed.communicator import Communicator


def gather(rows: Tensor, counts: Tensor, comm: Communicator) -> Tensor:
    """The rows (B, H, n_r, F) of all ranks, (B, H, ranks x width, F), in working precision.

    counts (ranks, B, H): how many of each rank's rows count. Rank r's own come from place r x width on, width being the
    largest count of a rank; the rest is zero.
    """
    width = max(1, int(counts.max()))
    rows = pad(rows, (0, 0, 0, width - rows.shape[2]))
    gathered: Tensor = _Gather.apply(rows, comm)  # type: ignore[no-untyped-call]
    return gathered.permute(1, 2, 0, 3, 4).flatten(2, 3)


class _Gather(torch.autograd.Function):
    """Tensors of all ranks, stacked, in working precision; each rank gets the sum of its tensor's gradients back."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, comm: Communicator) -> Tensor:
        ctx.comm, ctx.dtype = comm, rows.dtype
        return working(torch.stack(comm.all_gather(rows)))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        agree(ctx.comm, "backward of attention", {"gradient": [*gradient.shape, str(gradient.dtype)]})
        # An all-reduce and not a reduce-scatter, which would need half the bytes: gloo makes the one of the other.
        return ctx.comm.all_reduce(gradient)[ctx.comm.rank].to(ctx.dtype), None
