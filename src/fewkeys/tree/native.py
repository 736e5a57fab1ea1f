"""The compiled kernels of forests: growing them (`native/split.h`), and descending them (`native/descend.h`)."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from fewkeys.native.build import call
from fewkeys.native.tensors import Rows, dense, pointers

_POINTER, _SIZE = ctypes.c_void_p, ctypes.c_int64


class _Split(ctypes.Structure):
    _fields_ = (
        *((name, _POINTER) for name in ("rows", "order")),
        *((name, _SIZE) for name in ("count", "size", "dim")),
    )


class _Trees(ctypes.Structure):
    _fields_ = (
        *((name, Rows) for name in ("key", "value")),
        *((name, _POINTER) for name in ("root", "size", "start", "base", "kind", "order")),
        *((name, _SIZE) for name in ("heads", "trees", "roots", "places", "dim", "value_dim")),
        ("share", ctypes.c_float),
    )


def split(rows: Tensor) -> Tensor:
    """What `tree.split.split` promises, of float32 rows; within leaves in their old order."""
    rows = rows.contiguous()
    order = torch.empty(rows.shape[:2], dtype=torch.int64)
    sizes = dict(zip(("count", "size", "dim"), rows.shape, strict=True))
    call("fewkeys_split", _Split(**pointers({"rows": rows, "order": order}), **sizes))
    return order


def grow(
    key: Tensor, value: Tensor, root: Tensor, kind: Tensor, size: Tensor, start: Tensor, base: Tensor, share: float
) -> Tensor:
    """The order (H, R) of trees of keys (H, n, D) and values, all float32.

    root (H, E, D, D): lower triangular. kind, size, start and base (trees,), int64: which root, how many keys from
    which on, and where the tree stands in the order. share: of the values in the features.
    """
    key, value = dense(key.unsqueeze(1)), dense(value.unsqueeze(1))
    heads, places = key.shape[0], int(size.sum())
    order = torch.empty((heads, places), dtype=torch.int64)
    held: dict[str, Tensor | None] = {"root": root, "size": size, "start": start, "base": base, "kind": kind}
    held = {name: None if part is None else part.contiguous() for name, part in held.items()} | {"order": order}
    told = _Trees(
        key=Rows.of(key),
        value=Rows.of(value),
        **pointers(held),
        heads=heads,
        trees=size.numel(),
        roots=root.shape[1],
        places=places,
        dim=key.shape[3],
        value_dim=value.shape[3],
        share=share,
    )
    call("fewkeys_grow", told)
    return order
