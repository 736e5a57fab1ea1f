"""Constants for all kinds of derivatives; and second derivatives of kernels by torch's operations."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ContextDecorator

import torch
from torch import Tensor


class constants(ContextDecorator):  # noqa: N801 (used as `torch.no_grad` is)
    """Results computed inside are constant for all derivatives; also a decorator.

    `torch.no_grad` alone stops gradients, but not derivatives in forward mode (`torch.func.jvp`).
    """

    def __enter__(self) -> None:
        self.before = torch.is_grad_enabled(), torch._C._is_fwd_grad_enabled()
        torch._C._set_grad_enabled(False)
        torch._C._set_fwd_grad_enabled(False)

    def __exit__(self, *_: object) -> None:
        torch._C._set_grad_enabled(self.before[0])
        torch._C._set_fwd_grad_enabled(self.before[1])

    def _recreate_cm(self) -> constants:
        return constants()


def gradients_of(inputs: Sequence[Tensor], outputs: Sequence[tuple[Tensor, Tensor]]) -> list[Tensor | None]:
    """The gradients of those `inputs` that require one, None for the others, with a graph for second derivatives.

    outputs: pairs of an output of torch's operations and its gradient.
    """
    wanted = [tensor for tensor in inputs if tensor.requires_grad]
    pairs = [(output, gradient) for output, gradient in outputs if output.requires_grad]
    if not wanted or not pairs:
        return [None] * len(inputs)
    results, gradients = ([pair[i] for pair in pairs] for i in (0, 1))
    parts = iter(torch.autograd.grad(results, wanted, gradients, create_graph=True, allow_unused=True))
    return [next(parts) if tensor.requires_grad else None for tensor in inputs]
