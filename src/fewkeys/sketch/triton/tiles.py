"""Tiles of matrices in Triton: what all kernels share. Not imported before a kernel is."""

# Kernels are compiled from their source: Triton, which ships no types, gives the meaning of what they take.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from collections.abc import Iterable
from typing import Any

import torch
import triton
import triton.language as tl

EMULATED = tl.constexpr(bool(triton.knobs.runtime.interpret))


def power_of_two(size: int) -> int:
    """The smallest that matrix units take and `size` fits in."""
    return max(16, 1 << (size - 1).bit_length())


def constants(values: Iterable[Any]) -> list[Any]:
    """Numbers and words that a kernel is compiled for; in a named tuple they pass as one argument."""
    return [tl.constexpr(value) for value in values]


def precision() -> str:
    """Tensor cores round float32 to 10 bits: as everywhere in torch, the user says whether they may."""
    return "ieee" if torch.get_float32_matmul_precision() == "highest" else "tf32"


@triton.jit
def dot(a, b, PRECISION: tl.constexpr):
    """`a @ b` in float32."""
    if EMULATED:
        # The interpreter multiplies the bits of bfloat16, not the numbers.
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, input_precision=PRECISION)


@triton.jit
def base_of(rows, strides, head, heads):
    """Where the rows of a head begin, of `heads` in a batch entry."""
    return rows + head // heads * strides[0] + head % heads * strides[1]


@triton.jit
def load_rows(base, row, rows, stride, column, columns):
    """A tile of a matrix (rows, columns) at `base`."""
    at = base + row.to(tl.int64)[:, None] * stride + column[None, :]
    return tl.load(at, mask=(row < rows)[:, None] & (column < columns)[None, :], other=0.0)


@triton.jit
def store_rows(base, row, rows, stride, column, columns, tile):
    """Write a tile of a matrix (rows, columns) at `base`, in the matrix's dtype."""
    at = base + row.to(tl.int64)[:, None] * stride + column[None, :]
    tl.store(at, tile.to(base.dtype.element_ty), mask=(row < rows)[:, None] & (column < columns)[None, :])
