"""Statistics, clusters and sums of keys in one pass each (`keys.cpp`); all without gradient.

Keys (B, H, N, D) and values (B, H, N, Dv) are float32 or bfloat16, everything else float32; `tensors.suits` them.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from fewkeys.native.build import library
from fewkeys.native.tensors import Rows, alike, pointer

_Pointer, _Size = ctypes.c_void_p, ctypes.c_int64


class _Survey(ctypes.Structure):
    _fields_ = (
        *((name, Rows) for name in ("key", "value")),
        *((name, _Pointer) for name in ("form", "shift", "spread", "importance")),
        *((name, _Pointer) for name in ("centre", "constant", "nearest", "label", "middle", "square")),
        *((name, _Size) for name in ("batch", "heads", "keys", "dim", "value_dim", "count")),
    )


class _Sums(ctypes.Structure):
    _fields_ = (
        *((name, Rows) for name in ("key", "value")),
        *((name, _Pointer) for name in ("label", "share", "sums")),
        *((name, _Size) for name in ("batch", "heads", "keys", "dim", "value_dim", "count")),
    )


def statistics(key: Tensor, form: Tensor, shift: Tensor) -> tuple[Tensor, Tensor]:
    """Spread and importance of the keys, as `survey` says."""
    spread, importance = form.new_empty((2, *key.shape[:3])).unbind()
    _survey(key, key[..., :0], (form, shift, spread, importance), (*_NOTHING, None, None))
    return spread, importance


def assign(key: Tensor, value: Tensor, centre: Tensor, constant: Tensor) -> tuple[Tensor, Tensor]:
    """The largest closeness of every key and its label, as `survey` says."""
    nearest = centre.new_empty(key.shape[:3])
    label = torch.empty_like(nearest, dtype=torch.int64)
    _survey(key, value, _NOTHING, (centre, constant, nearest, label, None, None))
    return nearest, label


def survey(
    key: Tensor, value: Tensor, form: Tensor, shift: Tensor, centre: Tensor, constant: Tensor, middle: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """What the queries see of every key, and its cluster; keys and values are read once.

    With `form` (B, H, D + 1, D), the rows of L^T and the mean query, and `shift` (B, H, D + 1, 1), what they give for
    the mean key: `x = form k - shift`, the *spread* `s = x_1^2 + .. + x_D^2` and the *importance* `x_(D+1) +
    (s - x_(D+1)^2) / 2`. With centres (B, H, C, D + Dv) and constants (B, H, C, 1): the largest *closeness*
    `[k, v] . centre_c + constant_c`, and the first c that attains it. With `middle` (B, H, 1, Dv): `|v - middle|^2`.

    Returns:
        Spread, importance, closeness and squared distance, all float32, and label, int64: (B, H, N) each.
    """
    spread, importance, nearest, square = form.new_empty((4, *key.shape[:3])).unbind()
    label = torch.empty_like(nearest, dtype=torch.int64)
    seen = (form, shift, spread, importance)
    _survey(key, value, seen, (centre, constant, nearest, label, middle, square))
    return spread, importance, nearest, square, label


_NOTHING = (None, None, None, None)


def _survey(key: Tensor, value: Tensor, seen: Sequence[Tensor | None], clusters: Sequence[Tensor | None]) -> None:
    """Write what is asked for to the tensors that are for it."""
    key, value = alike(key, value)
    held = [None if part is None else part.contiguous() for part in (*seen, *clusters)]
    count = 0 if clusters[0] is None else clusters[0].shape[2]
    sizes = (*key.shape, value.shape[3], count)
    problem = _Survey(Rows.of(key), Rows.of(value), *(pointer(part) for part in held), *sizes)
    _call("fewkeys_survey", problem, key.dtype)


def label_sums(key: Tensor, value: Tensor, label: Tensor, share: Tensor, count: int) -> Tensor:
    """`sum_{j: label_j = c} share_j [k_j, v_j]` (B, H, count, D + Dv) for labels and shares (B, H, N)."""
    (key, value), label, share = alike(key, value), label.contiguous(), share.contiguous()
    sums = share.new_zeros((*key.shape[:2], count, key.shape[3] + value.shape[3]))
    held = (label, share, sums)
    sizes = (*key.shape, value.shape[3], count)
    problem = _Sums(Rows.of(key), Rows.of(value), *(part.data_ptr() for part in held), *sizes)
    _call("fewkeys_label_sums", problem, key.dtype)
    return sums


def _call(name: str, problem: ctypes.Structure, dtype: torch.dtype) -> None:
    threads = ctypes.c_int(torch.get_num_threads())
    getattr(library(), name)(ctypes.byref(problem), ctypes.c_int(dtype == torch.bfloat16), threads)
