"""The precision of statistics, independent of the inputs' dtype and of autocast."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor

KINDS = ("cpu", "cuda")


def working(tensor: Tensor) -> Tensor:
    """`tensor` in the precision of statistics: float64 stays, all else becomes float32."""
    return tensor if tensor.dtype == torch.float64 else tensor.float()


def widened(tensor: Tensor) -> Tensor:
    """float16 on a CPU in float32: kernels do not read float16, and torch is slow with it."""
    is_half = tensor.dtype == torch.float16 and tensor.device.type == "cpu"
    return tensor.to(torch.float32, memory_format=torch.contiguous_format) if is_half else tensor


def working_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of `working` tensors."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def autocast_is_on() -> bool:
    """Whether autocast is on for any device."""
    return torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda")  # no loop: every layer asks this


def lowered(tensor: Tensor) -> Tensor:
    """`tensor` in the dtype of autocast if that is on, as torch's attention does; float64 stays."""
    kind = tensor.device.type
    is_on = kind in KINDS and torch.is_autocast_enabled(kind)
    return tensor.to(torch.get_autocast_dtype(kind)) if is_on and tensor.dtype != torch.float64 else tensor


@contextmanager
def full_precision() -> Iterator[None]:
    """Autocast is off inside; also a decorator."""
    with ExitStack() as stack:
        if autocast_is_on():
            for kind in filter(torch.is_autocast_enabled, KINDS):
                stack.enter_context(torch.autocast(kind, enabled=False))
        yield


@contextmanager
def plain_defaults() -> Iterator[None]:
    """The default dtype is float32 and the default device the CPU inside; also a decorator."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        with torch.device("cpu"):
            yield
    finally:
        torch.set_default_dtype(before)
