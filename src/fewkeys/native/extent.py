"""The largest entries of a problem, and its rows head by head, by the compiled kernel (`native/extent.h`)."""

import ctypes
import sys
from typing import Any

import torch
from torch import Tensor

from fewkeys.core.validation import Rows as TensorRows, as_they_are
from fewkeys.native.build import call
from fewkeys.native.tensors import DTYPES, readable, sized, struct, wants_gradient


def largest_and_rows(
    query: Tensor, key: Tensor, value: Tensor, by_head: bool = False
) -> tuple[list[float], TensorRows]:
    """`core.validation.as_they_are` for queries (B, Hq, Nq, D), keys (B, Hkv, Nk, D) and values of one dtype: in one
    call of all threads, where torch makes three.

    by_head: the rows are copies that are contiguous head by head, unless gradients are needed. In models the rows of
    all heads of a token are contiguous, and the kernel reads them in this order. torch copies head by head, and waits
    for memory at every row of a tensor that is larger than the cache.
    """
    rows = query, key, value
    if torch.compiler.is_dynamo_compiling() or query.dtype not in DTYPES or not readable(*rows):
        return as_they_are(*rows)
    fields = {**sized(key, value), "query": query, "queries": query.shape[2]}
    if by_head and not wants_gradient(*rows) and not all(part.is_contiguous() for part in rows):
        sizes = [part.numel() for part in rows]
        parts = _scratch(sum(sizes), query.dtype).split(sizes)
        first, second, third = (part.view(row.shape) for part, row in zip(parts, rows, strict=True))
        fields |= {"query_copy": first, "key_copy": second, "value_copy": third}
        rows = first, second, third
    numbers = (ctypes.c_float * 3)()
    call("fewkeys_extents", struct("Extents")(**fields, largest=ctypes.addressof(numbers)), query.dtype)
    return list(numbers), rows


_LARGEST_SCRATCH = 2**26
_scratches: list[Any] = []


def _scratch(count: int, dtype: torch.dtype) -> Tensor:
    """Memory of an earlier call that no tensor uses now, else new memory, which is kept for later calls if it is small.

    The operating system must clear new pages, which takes as long as the copies of a layer.
    """
    size = count * dtype.itemsize
    try:
        buffer = _scratches.pop()  # now no other thread has it
    except IndexError:
        buffer = None
    # A tensor of the buffer would be a third reference, besides the variable and the argument of `getrefcount`.
    if buffer is None or len(buffer) < size or sys.getrefcount(buffer) > 2:
        buffer = torch.empty(size, dtype=torch.uint8, device="cpu").numpy()
    scratch = torch.from_numpy(buffer)
    if len(buffer) <= _LARGEST_SCRATCH and not _scratches:
        _scratches.append(buffer)
    return scratch[:size].view(dtype)
