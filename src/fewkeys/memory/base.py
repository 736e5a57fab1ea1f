"""What the two kinds of a stream's memory share."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from fewkeys.plan import Plan

LeafType = Literal["model", "int8"]
"""The form of stored keys and values: the dtype of the model, or int8 with a scale for each row."""


def check_leaves(leaves: object, plans: Iterable[Plan]) -> None:
    """Raise `ValueError` for a form of keys and values that is unknown or that no plan supports."""
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


@dataclass(frozen=True)
class SavedFacts:
    """What a file says of a memory beside its tensors. moved: `State.moved` of a `Constant`."""

    dtype: Literal["torch.float64", "torch.float32", "torch.bfloat16", "torch.float16"]
    moved: int | None = None

    def torch_dtype(self) -> torch.dtype:
        dtype: torch.dtype = getattr(torch, self.dtype.removeprefix("torch."))
        return dtype


def named_rows(tensors: Mapping[str, Tensor], root: str) -> tuple[Tensor, Tensor]:
    """The keys (B, Hkv, N, D) and values of a file; `ValueError` unless they match each other."""
    key, value = tensors.get(f"{root}key"), tensors.get(f"{root}value")
    if key is None or value is None or any(x.ndim != 4 or 0 in (*x.shape[:2], x.shape[3]) for x in (key, value)):
        raise ValueError(f"expected {root}key and {root}value (batch, heads, tokens, dim), got none such")
    if value.shape[:3] != key.shape[:3] or value.dtype != key.dtype:
        raise ValueError(f"expected {root}value {tuple(key.shape[:3])} of {key.dtype}, got {tuple(value.shape)}")
    return key, value
