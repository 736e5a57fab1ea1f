"""Constants for all kinds of derivatives, and derivatives of kernels by torch's operations."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad


class constants:  # noqa: N801  # used like `torch.no_grad`, of which it is a faster form
    """Results computed inside are constant for all derivatives.

    `torch.no_grad` alone stops gradients, but not derivatives in forward mode (`torch.func.jvp`).
    """

    def __enter__(self) -> None:
        self.before = torch.is_grad_enabled(), torch._C._is_fwd_grad_enabled()
        torch._C._set_grad_enabled(False)
        torch._C._set_fwd_grad_enabled(False)

    def __exit__(self, *_: object) -> None:
        gradients, forward = self.before
        torch._C._set_grad_enabled(gradients)
        torch._C._set_fwd_grad_enabled(forward)


def in_backward() -> bool:
    """Whether this thread runs a backward pass of autograd, in which checkpoints compute layers again."""
    return torch._C._current_graph_task_id() != -1


def are_transformed(*tensors: Tensor) -> bool:
    """Whether forward mode or `torch.func` differentiates these tensors; both need torch's plain operations."""
    return forward_ad._current_level >= 0 or any(map(torch._C._functorch.is_functorch_wrapped_tensor, tensors))


def gradients_of(inputs: Sequence[Tensor], outputs: Sequence[tuple[Tensor, Tensor]]) -> list[Tensor | None]:
    """The gradients of the `inputs`, None for those that require none; differentiable if gradients are enabled.

    outputs: pairs of an output and its gradient.
    """
    wanted = [tensor for tensor in inputs if tensor.requires_grad]
    pairs = [(output, gradient) for output, gradient in outputs if output.requires_grad]
    if not wanted or not pairs:
        return [None] * len(inputs)
    results, gradients = zip(*pairs, strict=True)
    again = torch.is_grad_enabled()
    parts = iter(torch.autograd.grad(results, wanted, gradients, create_graph=again, allow_unused=True))
    return [next(parts) if tensor.requires_grad else None for tensor in inputs]


def gradients_by_torch(
    compute: Callable[..., Sequence[Tensor | None]], inputs: Sequence[Tensor], gradients: Sequence[Tensor | None]
) -> list[Tensor | None]:
    """`gradients_of` for outputs of a kernel, which `compute(*inputs)` computes again; None: an output has none."""
    # Inputs may depend on each other: each copy gets its own part of the gradient alone.
    again = torch.is_grad_enabled()
    leaves = [rows.view_as(rows) if again else rows.detach().requires_grad_(rows.requires_grad) for rows in inputs]
    with torch.enable_grad():
        outputs = compute(*leaves)
    pairs = zip(outputs, gradients, strict=True)
    return gradients_of(leaves, [(out, grad) for out, grad in pairs if out is not None and grad is not None])


def recomputed(kernel: Callable[..., Tensor], by_torch: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
    """`kernel(*inputs)` with the gradients of `by_torch(*inputs)`, which the backward pass computes from the inputs."""
    output: Tensor = _Recomputed.apply(kernel, by_torch, *inputs)  # type: ignore[no-untyped-call]
    return output


class _Recomputed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, kernel: Callable[..., Tensor], by_torch: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
        ctx.save_for_backward(*inputs)
        ctx.by_torch = by_torch
        return kernel(*inputs)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return None, None, *gradients_by_torch(lambda *rows: [ctx.by_torch(*rows)], ctx.saved_tensors, [gradient])
