"""Stored keys and values, as they come or in int8: `round(x / s)` for each row x, with the scale `s = max |x| / 127` in
working precision. The error is at most s / 2.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from fewkeys.core.fields import Buffer, Fields
from fewkeys.core.precision import working, working_dtype
from fewkeys.core.tensor_files import Form, check
from fewkeys.plan import Plan

LARGEST = 127

LeafType = Literal["model", "int8"]
"""The form of stored keys and values: as they come, or int8 with a scale for each row."""


def check_leaves(leaves: object, plans: Iterable[Plan]) -> None:
    """Raise `ValueError` for an unknown form, or one that no plan supports."""
    if leaves is not None and leaves not in get_args(LeafType):
        raise ValueError(f"leaves: expected None, 'model' or 'int8', got {leaves!r}")
    if leaves == "int8" and not any(plan.scanned for plan in plans):
        raise ValueError(f"leaves: expected None for plans without KeyScan, got {leaves}; leave it out")


@dataclass(frozen=True)
class Rules:
    """The plan, the form of stored keys and values, and how many latest tokens can always be removed."""

    plan: Plan
    leaves: LeafType
    undo: int


@dataclass(frozen=True, eq=False)
class HeldRows(Fields):
    """Keys (B, Hkv, N, D) and values (B, Hkv, N, Dv) of N tokens, which came in `dtype`.

    scale (B, Hkv, N, 2): of key and value in int8; else None.
    """

    dtype: torch.dtype
    key: Buffer
    value: Buffer
    scale: Buffer | None = None

    @staticmethod
    def empty(leaves: LeafType, key: Tensor, value: Tensor) -> HeldRows:
        """No tokens, of the shape of others."""
        return HeldRows(key.dtype, *map(Buffer, _stored(key[:, :, :0], value[:, :, :0], leaves == "int8")))

    @property
    def count(self) -> int:
        return self.key.count

    @property
    def buffers(self) -> tuple[Buffer, ...]:
        return (self.key, self.value) if self.scale is None else (self.key, self.value, self.scale)

    def append(self, key: Tensor, value: Tensor) -> None:
        for buffer, rows in zip(self.buffers, _stored(key, value, self.scale is not None), strict=True):
            buffer.append(rows)

    def read(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Keys and values of some tokens; from int8 in working precision."""
        part = slice(start, stop)
        key, value = self.key.rows[:, :, part], self.value.rows[:, :, part]
        if self.scale is None:
            return key, value
        dtype, scale = working_dtype(self.dtype), self.scale.rows[:, :, part]
        return key.to(dtype) * scale[..., :1], value.to(dtype) * scale[..., 1:]

    def filled(self, count: int, tensors: Mapping[str, Tensor], root: str) -> HeldRows:
        """The rows of `count` tokens in a file; `ValueError` unless they are of this form: kernels trust it."""
        least = {torch.int8: -LARGEST} | ({} if self.scale is None else {self.scale.storage.dtype: 0})
        forms = {
            name: Form((*part.shape[:2], count, part.shape[3]), part.dtype, least.get(part.dtype, -math.inf))
            for name, part in self.tensors(root).items()
        }
        check(tensors, forms)
        return self.with_tensors(tensors, root)


def _stored(key: Tensor, value: Tensor, in_int8: bool) -> tuple[Tensor, ...]:
    """Keys and values as they are stored, and in int8 their scales."""
    if not in_int8:
        return key, value
    (key, of_key), (value, of_value) = _rounded(key), _rounded(value)
    return key, value, torch.cat([of_key, of_value], -1)


def _rounded(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Rows (..., N, X) as int8, and their scales (..., N, 1)."""
    rows = working(rows)
    scale = rows.abs().amax(-1, keepdim=True) / LARGEST
    number = (rows / torch.where(scale > 0, scale, 1.0)).round().clamp(-LARGEST, LARGEST)
    return number.to(torch.int8), scale
