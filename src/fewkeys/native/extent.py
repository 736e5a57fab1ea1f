"""The largest entries of a problem, and its rows head by head, by the compiled kernel (`native/extent.h`)."""

import ctypes
import sys
from typing import Any

import torch
from torch import Tensor

from fewkeys.core.validation import Rows as TensorRows
from fewkeys.core.validation import largest_entries
from fewkeys.native.build import call
from fewkeys.native.tensors import DTYPES, readable, sized, struct, wants_gradient


def largest(query: Tensor, key: Tensor, value: Tensor) -> list[float]:
    """`core.validation.largest_entries` of queries (B, Hq, Nq, D), keys (B, Hkv, Nk, D) and values of one dtype: in one
    call of all threads, where torch makes three.
    """
    rows = query, key, value
    return _look(*rows) if _can_read(*rows) else largest_entries(*rows)


def by_head(query: Tensor, key: Tensor, value: Tensor) -> tuple[list[float], TensorRows]:
    """`largest`, and copies of the rows that are contiguous head by head, unless gradients are needed.

    In models the rows of all heads of a token are contiguous, and the kernel reads them in this order. torch copies
    head by head, and waits for memory at every row of a tensor that is larger than the cache.
    """
    rows = query, key, value
    if not _can_read(*rows) or wants_gradient(*rows) or all(part.is_contiguous() for part in rows):
        return largest(*rows), rows
    sizes = [part.numel() for part in rows]
    parts = _scratch(sum(sizes), query.dtype).split(sizes)
    query_copy, key_copy, value_copy = (part.view(row.shape) for part, row in zip(parts, rows, strict=True))
    entries = _look(*rows, query_copy=query_copy, key_copy=key_copy, value_copy=value_copy)
    return entries, (query_copy, key_copy, value_copy)


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


def _can_read(query: Tensor, key: Tensor, value: Tensor) -> bool:
    return not torch.compiler.is_dynamo_compiling() and query.dtype in DTYPES and readable(query, key, value)


def _look(query: Tensor, key: Tensor, value: Tensor, **copies: Tensor) -> list[float]:
    numbers = (ctypes.c_float * 3)()
    queries = {"query": query, "queries": query.shape[2]}
    args = struct("Extents")(**sized(key, value), **queries, **copies, largest=ctypes.addressof(numbers))
    call("fewkeys_extents", args, query.dtype)
    return list(numbers)
