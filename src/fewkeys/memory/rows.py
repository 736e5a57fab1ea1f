"""Stored keys and values, as they come or in int8: `round(x / s)` for each row x, with the scale `s = max |x| / 127` in
working precision. The error is at most s / 2.
"""

from __future__ import annotations

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

    def join(self, other: HeldRows) -> None:
        if (self.scale is None) != (other.scale is None):
            self.append(*(rows.to(self.dtype) for rows in other.read(0, other.count)))
            return
        for buffer, more in zip(self.buffers, other.buffers, strict=True):
            buffer.append(more.rows)

    @staticmethod
    def checked(tensors: Mapping[str, Tensor], dtype: torch.dtype, root: str) -> HeldRows:
        """The rows in the tensors of a file; `ValueError` if they are not valid."""
        key, _ = named_rows(tensors, root)
        scale, any_shape = tensors.get(f"{root}scale"), (None,) * 4
        form = Form(any_shape, dtype) if scale is None else Form(any_shape, torch.int8, -LARGEST)
        forms = {f"{root}key": form, f"{root}value": form}
        if scale is not None:
            forms[f"{root}scale"] = Form((*key.shape[:3], 2), working_dtype(dtype), 0)
        check(tensors, forms)
        return HeldRows(dtype, *(Buffer(tensors[name], key.shape[2]) for name in forms))


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


def named_rows(tensors: Mapping[str, Tensor], root: str) -> tuple[Tensor, Tensor]:
    """The keys (B, Hkv, N, D) and values of a file; `ValueError` unless they match each other."""
    key, value = tensors.get(f"{root}key"), tensors.get(f"{root}value")
    if key is None or value is None or any(x.ndim != 4 or 0 in (*x.shape[:2], x.shape[3]) for x in (key, value)):
        raise ValueError(f"expected {root}key and {root}value (batch, heads, tokens, dim), got none such")
    if value.shape[:3] != key.shape[:3] or value.dtype != key.dtype:
        raise ValueError(f"expected {root}value {tuple(key.shape[:3])} of {key.dtype}, got {tuple(value.shape)}")
    return key, value
