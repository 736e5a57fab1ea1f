"""Constants in all kinds of derivatives, and derivatives of kernels by torch's operations."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from fewkeys.core.precision import full_precision


class constants:  # noqa: N801  # used like `torch.no_grad`, and faster
    """Results computed inside are constant, unlike those of `torch.no_grad` also in forward mode (`torch.func.jvp`)."""

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
    how = {"create_graph": torch.is_grad_enabled(), "retain_graph": True, "allow_unused": True}
    parts = iter(torch.autograd.grad(results, wanted, gradients, **how))
    return [next(parts) if tensor.requires_grad else None for tensor in inputs]


def recomputed(
    kernel: Callable[..., Any],
    by_torch: Callable[..., Sequence[Tensor | None]],
    *inputs: Tensor,
    constant: Sequence[int] = (),
) -> Any:
    """`kernel(*inputs)`, whose gradients are those of `by_torch(*inputs)`, computed again in the backward pass.

    constant: the numbers of the outputs that have no gradient.
    """
    return _Recomputed.apply(kernel, by_torch, constant, *inputs)  # type: ignore[no-untyped-call]


class _Recomputed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, kernel: Callable[..., Any], by_torch: Any, constant: Sequence[int], *inputs: Tensor) -> Any:
        ctx.save_for_backward(*inputs)
        ctx.by_torch = by_torch
        outputs = kernel(*inputs)
        ctx.mark_non_differentiable(*(outputs[number] for number in constant))
        return outputs

    @staticmethod
    @full_precision()  # the call had the dtype of autocast, which may be on here
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        # Inputs may depend on each other: each copy gets its own part of the gradient alone.
        with torch.enable_grad():
            copies = [rows.view_as(rows) for rows in ctx.saved_tensors]
            pairs = zip(ctx.by_torch(*copies), gradients, strict=True)
        flowing = [(output, gradient) for output, gradient in pairs if output is not None and gradient is not None]
        return None, None, None, *gradients_of(copies, flowing)
