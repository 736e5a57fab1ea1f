"""Statistics, clusters and sums of keys in one pass each (`keys.cpp`); all without gradient.

Keys (B, H, N, D) and values (B, H, N, Dv) are float32 or bfloat16, everything else float32; `tensors.suits` them.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from fewkeys.native.build import library
from fewkeys.native.tensors import Rows, dense

_Pointer, _Size = ctypes.c_void_p, ctypes.c_int64


class _Statistics(ctypes.Structure):
    _fields_ = (
        ("key", Rows),
        *((name, _Pointer) for name in ("form", "centre", "spread", "importance")),
        *((name, _Size) for name in ("batch", "heads", "keys", "dim")),
    )


class _Assign(ctypes.Structure):
    _fields_ = (
        *((name, Rows) for name in ("key", "value")),
        *((name, _Pointer) for name in ("centre", "constant", "label", "nearest")),
        *((name, _Size) for name in ("batch", "heads", "keys", "dim", "value_dim", "count")),
    )


class _Sums(ctypes.Structure):
    _fields_ = (
        *((name, Rows) for name in ("key", "value")),
        *((name, _Pointer) for name in ("label", "share", "sums")),
        *((name, _Size) for name in ("batch", "heads", "keys", "dim", "value_dim", "count")),
    )


def statistics(key: Tensor, root: Tensor, mean_query: Tensor, mean_key: Tensor) -> tuple[Tensor, Tensor]:
    """`|L^T (k - mean)|^2` and the importance (B, H, N) of keys; root L (B, H, D, D), means (B, H, 1, D)."""
    key, form = dense(key), torch.cat([root.mT, mean_query], 2)
    centre = form @ mean_key.mT
    spread, importance = mean_key.new_empty((2, *key.shape[:3])).unbind()
    held = (form, centre, spread, importance)
    problem = _Statistics(Rows.of(key), *(part.data_ptr() for part in held), *key.shape)
    _call("fewkeys_statistics", problem, key.dtype)
    return spread, importance


def assign(key: Tensor, value: Tensor, centre: Tensor, constant: Tensor) -> tuple[Tensor, Tensor]:
    """The largest `[k, v] . centre_c + constant_c` of every key (B, H, N), and the first c that attains it, int64.

    centre (B, H, C, D + Dv), constant (B, H, C).
    """
    key, value, centre, constant = dense(key), dense(value), centre.contiguous(), constant.contiguous()
    nearest = centre.new_empty(key.shape[:3])
    label = torch.empty_like(nearest, dtype=torch.int64)
    held = (centre, constant, label, nearest)
    sizes = (*key.shape, value.shape[3], centre.shape[2])
    problem = _Assign(Rows.of(key), Rows.of(value), *(part.data_ptr() for part in held), *sizes)
    _call("fewkeys_assign", problem, key.dtype)
    return nearest, label


def label_sums(key: Tensor, value: Tensor, label: Tensor, share: Tensor, count: int) -> Tensor:
    """`sum_{j: label_j = c} share_j [k_j, v_j]` (B, H, count, D + Dv) for labels and shares (B, H, N)."""
    key, value, label, share = dense(key), dense(value), label.contiguous(), share.contiguous()
    sums = share.new_zeros((*key.shape[:2], count, key.shape[3] + value.shape[3]))
    held = (label, share, sums)
    sizes = (*key.shape, value.shape[3], count)
    problem = _Sums(Rows.of(key), Rows.of(value), *(part.data_ptr() for part in held), *sizes)
    _call("fewkeys_label_sums", problem, key.dtype)
    return sums


def _call(name: str, problem: ctypes.Structure, dtype: torch.dtype) -> None:
    threads = ctypes.c_int(torch.get_num_threads())
    getattr(library(), name)(ctypes.byref(problem), ctypes.c_int(dtype == torch.bfloat16), threads)
