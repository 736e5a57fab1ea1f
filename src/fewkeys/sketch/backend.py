"""Which kernels look at keys: as `Inputs.impl` says, compiled ones on the CPU, Triton's, or torch's operations."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

import fewkeys.native as native
from fewkeys.core.impl import COMPILED, Impl
from fewkeys.core.inputs import Inputs
from fewkeys.native.tensors import unwatched

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
LARGEST_HEAD = 256


class Kernels(Protocol):
    """Keys (B, H, N, D) and values (B, H, N, Dv), each read once, without gradient.

    With `form` (B, H, D + 1, D), the rows of L^T, L lower triangular, and the mean query, and `shift` (B, H, D + 1, 1),
    what they give for the mean key: `x = form k - shift`, the *spread* `s = x_1^2 + .. + x_D^2` and the *importance*
    `x_(D+1) + (s - x_(D+1)^2) / 2`. With centres (B, H, C, D + Dv) and constants (B, H, C, 1): the largest *closeness*
    `[k, v] . centre_c + constant_c`, and the first c that attains it; with `middle` (B, H, 1, Dv): `|v - middle|^2`.
    All float32, and the *label* c int64: (B, H, N).
    """

    def statistics(self, key: Tensor, form: Tensor, shift: Tensor) -> tuple[Tensor, Tensor]:
        """Spread and importance."""

    def assign(self, key: Tensor, value: Tensor, centre: Tensor, constant: Tensor) -> tuple[Tensor, Tensor]:
        """Closeness and label."""

    def survey(
        self, key: Tensor, value: Tensor, form: Tensor, shift: Tensor, centre: Tensor, constant: Tensor, middle: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Spread, importance, closeness, squared distance from the middle, and label."""

    def label_sums(self, key: Tensor, value: Tensor, label: Tensor, share: Tensor, count: int) -> Tensor:
        """`sum_{j: label_j = c} share_j [k_j, v_j]` (B, H, count, D + Dv) for labels and shares (B, H, N)."""


def compiled(inputs: Inputs, key: Tensor, value: Tensor, *others: Tensor) -> bool:
    """Whether compiled kernels may do several steps of the statistics at once: no shard adds sums in between."""
    return inputs.shard is None and inputs.impl in COMPILED and native.suits(key, value, *others)


def backend(impl: Impl, key: Tensor, value: Tensor | None, *others: Tensor) -> Kernels | None:
    """Kernels of `impl` that can read these tensors, where nobody asks how the result depends on them.

    None where torch's operations do the work: for `"torch"` and `"reference"`, and where no kernels suit. Triton's are
    taken for `"triton"` alone: on CUDA, or where its interpreter emulates it.
    """
    given = [key, *([] if value is None else [value]), *others]
    if impl != "triton":
        return native if impl in COMPILED and native.suits(*given) else None
    if any(x.dtype not in DTYPES for x in given) or not unwatched(*given):
        return None
    if max(x.shape[-1] for x in (key, key if value is None else value)) > LARGEST_HEAD:
        return None
    try:
        import triton

        from fewkeys.sketch.triton import op
    except ImportError:  # Triton is an extra.
        return None
    return op if key.device.type == "cuda" or triton.knobs.runtime.interpret else None
