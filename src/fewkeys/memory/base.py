"""What a stream knows of memory: what every kind of it can do, whatever it holds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol, Self, get_args

import torch
from torch import Tensor

from fewkeys.core.validation import FLOATS
from fewkeys.plan import Plan

LeafType = Literal["model", "int8"]


@dataclass(frozen=True)
class Held:
    """How keys and values are held: in which dtype; "model": as they come."""

    dtype: LeafType = "model"

    def __post_init__(self) -> None:
        if self.dtype not in get_args(LeafType):
            raise ValueError(f"leaves: expected None, 'model' or 'int8', got {self.dtype!r}")


@dataclass(frozen=True, eq=False)
class Rules:
    """What memory goes by: the plan, how keys and values are held, and how many tokens can be taken back."""

    plan: Plan
    how: Held
    undo: int


class Memory(Protocol):
    """What a stream holds of sequences whose real tokens come together: `Fields`, of tokens in `dtype`.

    Every change gives a new memory, and the one before is of no more use.
    """

    @property
    def dtype(self) -> torch.dtype: ...

    @staticmethod
    def check(plan: Plan) -> None:
        """`TypeError` or `ValueError` for a plan that no such memory can run."""

    @staticmethod
    def begin(rules: Rules, key: Tensor, value: Tensor) -> Memory:
        """Memory before the first token, in the shape of keys (B, Hkv, any, D) and values (B, Hkv, any, Dv)."""

    @staticmethod
    def restored(rules: Rules, count: int, facts: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Memory:
        """What `facts` and `tensors` gave after `count` tokens; `ValueError` where that is no such memory."""

    def make_room(self, query: Tensor | None, key: Tensor, value: Tensor) -> None:
        """Make room for what `take` will be given; `MemoryError` where there is none, and nothing has changed."""

    def take(
        self, query: Tensor | None, key: Tensor, value: Tensor, scale: float, is_large: bool
    ) -> tuple[Self, Tensor | None]:
        """With the tokens key (B, Hkv, N, D) and value (B, Hkv, N, Dv), and the outputs (B, Hq, N, Dv) of their queries
        (B, Hq, N, D), if there are any. `is_large`: sums of their squares may have no float.
        """

    def refusal(self, count: int) -> str | None:
        """Why what came after the first `count` tokens cannot be forgotten any more, None where it can."""

    def crop(self, count: int) -> Self:
        """Without what came after the first `count` tokens, which is not refused."""

    def merge(self, other: Self) -> Self:
        """As if the tokens of another memory of the same plan had come next."""

    def like(self) -> tuple[Tensor, Tensor]:
        """Keys and values (B, Hkv, any, D or Dv) as they are held."""

    def facts(self) -> dict[str, Any]:
        """What is to be written beside the tensors, as JSON knows it."""

    def tensors(self, root: str = "") -> dict[str, Tensor]: ...

    def select(self, index: Tensor) -> Self: ...

    def bytes(self) -> int: ...


def named_dtype(name: str) -> torch.dtype:
    """The dtype of keys that a file names; `ValueError` for others."""
    kinds = {str(dtype): dtype for dtype in FLOATS}
    if name not in kinds:
        raise ValueError(f"expected a dtype of floating-point numbers, got {name}")
    return kinds[name]


def named_rows(tensors: Mapping[str, Tensor], root: str) -> tuple[Tensor, Tensor]:
    """Keys (B, Hkv, N, D) and values (B, Hkv, N, Dv) under the names "key" and "value", by which all else must go."""
    key, value = tensors.get(f"{root}key"), tensors.get(f"{root}value")
    if key is None or value is None or any(x.ndim != 4 or 0 in (*x.shape[:2], x.shape[3]) for x in (key, value)):
        raise ValueError(f"expected {root}key and {root}value (batch, heads, tokens, dim), got none such")
    if value.shape[:3] != key.shape[:3] or value.dtype != key.dtype:
        raise ValueError(f"expected {root}value {tuple(key.shape[:3])} of {key.dtype}, got {tuple(value.shape)}")
    return key, value
