"""Keys and values as they are held: as they come, or in int8.

Under int8 a key is `round(k / s)` with a scale `s = max |k| / 127` of its own, in float32, and so is a value: off by
s / 2 at most.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

import torch
from torch import Tensor

from fewkeys.core.buffer import Buffer
from fewkeys.core.precision import working
from fewkeys.core.tensor_files import Form, check

LARGEST = 127
LeafType = Literal["model", "int8"]


@dataclass(frozen=True)
class Held:
    """How keys and values are held: in which dtype ("model": as they come), and in files of which folder (None: in
    memory).
    """

    dtype: LeafType = "model"
    folder: str | None = None

    def __post_init__(self) -> None:
        if self.dtype not in get_args(LeafType):
            raise ValueError(f"leaves: expected None, 'model' or 'int8', got {self.dtype!r}")
        if self.folder is not None and not Path(self.folder).is_dir():
            raise ValueError(f"folder: expected a folder that is there, got {self.folder}; make it first")

    @staticmethod
    def of(leaves: LeafType | None, folder: str | os.PathLike[str] | None, otherwise: LeafType) -> Held:
        """As arguments say; `otherwise`: the dtype where they say none."""
        return Held(otherwise if leaves is None else leaves, None if folder is None else os.fspath(folder))


class HeldRows:
    """The keys (B, Hkv, N, D) and values (B, Hkv, N, Dv) of N tokens.

    `buffers`: "key" and "value", and under int8 "scale" (B, Hkv, N, 2), of both. `like`: no keys and values, of the
    kind that came.
    """

    def __init__(self, buffers: dict[str, Buffer], dtype: torch.dtype) -> None:
        self.buffers, self.dtype = buffers, dtype
        key, value = (buffers[name].rows for name in ("key", "value"))
        # Not views: those would keep memory that buffers have left behind.
        key, value = (rows.new_empty((*rows.shape[:2], 0, rows.shape[3]), dtype=dtype) for rows in (key, value))
        self.like = key, value

    @staticmethod
    def empty(how: Held, key: Tensor, value: Tensor) -> HeldRows:
        """None yet, in the shape of keys (B, Hkv, any, D) and values."""
        key, value = key[:, :, :0], value[:, :, :0]
        tensors = _written(key, value, how.dtype == "int8")
        return HeldRows({name: Buffer(rows, folder=how.folder) for name, rows in tensors.items()}, key.dtype)

    @property
    def key(self) -> Tensor:
        return self.buffers["key"].rows

    @property
    def value(self) -> Tensor:
        return self.buffers["value"].rows

    @property
    def scale(self) -> Tensor | None:
        return self.buffers["scale"].rows if "scale" in self.buffers else None

    @property
    def count(self) -> int:
        return self.buffers["key"].count

    def make_room(self, count: int) -> None:
        """Make room for so many tokens in all; `OSError` where there is none, and nothing has changed."""
        for buffer in self:
            buffer.make_room(count)

    def append(self, key: Tensor, value: Tensor) -> None:
        """Add tokens."""
        for name, rows in _written(key, value, "scale" in self.buffers).items():
            self.buffers[name].append(rows)

    def read(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Keys and values, in working precision where they are held in int8."""
        part = slice(start, stop)
        key, value, scale = self.key[:, :, part], self.value[:, :, part], self.scale
        if scale is None:
            return key, value
        kind = working(torch.empty(0, dtype=self.dtype)).dtype
        return tuple(  # type: ignore[return-value]
            rows.to(kind) * scale[:, :, part, number, None] for number, rows in enumerate((key, value))
        )

    def join(self, other: HeldRows) -> None:
        """Add the tokens of others."""
        if (self.scale is None) != (other.scale is None):
            self.append(*(rows.to(self.dtype) for rows in other.read(0, other.count)))
            return
        for name, buffer in self.buffers.items():
            buffer.append(other.buffers[name].rows)

    def tensors(self) -> dict[str, Tensor]:
        """What is held, by name."""
        return {name: buffer.rows for name, buffer in self.buffers.items()}

    @staticmethod
    def checked(tensors: Mapping[str, Tensor], dtype: torch.dtype) -> HeldRows:
        """Rows of which `tensors` gave these; `ValueError` where they are none, of keys that came in `dtype`."""
        key, value, scale = (tensors.get(name) for name in ("key", "value", "scale"))
        if (
            key is None
            or value is None
            or any(part.ndim != 4 or 0 in (*part.shape[:2], part.shape[3]) for part in (key, value))
        ):
            raise ValueError("expected key and value (batch, heads, tokens, dim), got none such")
        kind = dtype if scale is None else torch.int8
        forms = {"key": Form(tuple(key.shape), kind), "value": Form((*key.shape[:3], value.shape[3]), kind)}
        if scale is not None:
            forms = {name: form._replace(least=-LARGEST, most=LARGEST) for name, form in forms.items()}
            forms["scale"] = Form((*key.shape[:3], 2), torch.float32, 0)
        check(tensors, forms)
        return HeldRows({name: Buffer(tensors[name], key.shape[2]) for name in forms}, dtype)

    def select(self, index: Tensor) -> HeldRows:
        """These sequences."""
        return HeldRows({name: buffer.select(index) for name, buffer in self.buffers.items()}, self.dtype)

    def __iter__(self) -> Iterator[Buffer]:
        return iter(self.buffers.values())


def _written(key: Tensor, value: Tensor, in_int8: bool) -> dict[str, Tensor]:
    if not in_int8:
        return {"key": key, "value": value}
    rounded = [_rounded(rows) for rows in (key, value)]
    return {
        "key": rounded[0][0],
        "value": rounded[1][0],
        "scale": torch.cat([scale for _, scale in rounded], -1),
    }


def _rounded(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Rows (..., N, X) as int8, and their scales (..., N, 1)."""
    rows = working(rows)
    scale = rows.abs().amax(-1, keepdim=True).float() / LARGEST
    number = (rows / scale.clamp_min(torch.finfo(torch.float32).tiny)).round().clamp(-LARGEST, LARGEST)
    return number.to(torch.int8), scale
