"""The largest entries of a problem, by the compiled kernel (`native/extent.h`)."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from fewkeys.core.validation import largest_entries
from fewkeys.native.build import call
from fewkeys.native.tensors import DTYPES, Rows, dense, readable, struct


def largest(query: Tensor, key: Tensor, value: Tensor) -> list[float]:
    """`core.validation.largest_entries` of queries (B, Hq, Nq, D), keys (B, Hkv, Nk, D) and values of one dtype: in one
    call of all threads, where torch makes three.
    """
    if torch.compiler.is_compiling() or query.dtype not in DTYPES or not readable(query, key, value):
        return largest_entries(query, key, value)
    held = {name: dense(rows) for name, rows in (("query", query), ("key", key), ("value", value))}
    numbers = (ctypes.c_float * 3)()
    args = struct("Extents")(
        **{name: Rows.of(rows) for name, rows in held.items()},
        largest=ctypes.addressof(numbers),
        batch=key.shape[0],
        heads=key.shape[1],
        gqa_ratio=query.shape[1] // key.shape[1],
        queries=query.shape[2],
        keys=key.shape[2],
        dim=key.shape[3],
        value_dim=value.shape[3],
    )
    call("fewkeys_extents", args, query.dtype)
    return list(numbers)
