"""Keys and values of the leaves as they are held: sealed once, read by every query that opens their leaf.

A row is bytes: a key and its value in the dtype of the leaves. Under int8 they are `round(x / s)`, after the scales
`s = max |x| / 127` of both, in float32: off by s / 2 at most. Rows stand chunk by chunk, so that more of them move
none: row r of head h is [r // CHUNK, h, r % CHUNK] of (chunks, H, CHUNK, width), in memory or in a file.
"""

from __future__ import annotations

import copy
import math
import mmap
import os
import tempfile
import weakref
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from fewkeys.core.buffer import room_for
from fewkeys.core.precision import working

CHUNK = 256
LARGEST = 127
LeafType = Literal["bfloat16", "int8"]


@dataclass(frozen=True)
class Held:
    """How leaves are held: in which dtype (None: that of the keys), and in a file of which folder (None: in memory)."""

    dtype: LeafType | None = None
    folder: str | None = None

    def __post_init__(self) -> None:
        if self.dtype not in (None, *get_args(LeafType)):
            raise ValueError(f"leaves: expected None, 'bfloat16' or 'int8', got {self.dtype!r}")
        if self.folder is not None and not Path(self.folder).is_dir():
            raise ValueError(f"folder: expected a folder that is there, got {self.folder}; make it first")


@dataclass(frozen=True)
class Form:
    """How keys of `dim` and values of `value_dim` dimensions are written into rows of `width` bytes, and read again."""

    dtype: torch.dtype
    dim: int
    value_dim: int
    working: torch.dtype

    @staticmethod
    def of(dtype: LeafType | None, key: Tensor, value: Tensor) -> Form:
        """For keys and values like these."""
        own = key.dtype if dtype is None else {"bfloat16": torch.bfloat16, "int8": torch.int8}[dtype]
        return Form(own, key.shape[-1], value.shape[-1], working(key[:0]).dtype)

    @property
    def key_at(self) -> int:
        """The byte at which the key begins, after the scales."""
        return 8 if self.dtype == torch.int8 else 0

    @property
    def value_at(self) -> int:
        return self.key_at + self.dim * self.dtype.itemsize

    @property
    def width(self) -> int:
        end = self.value_at + self.value_dim * self.dtype.itemsize
        return -(-end // 8) * 8

    def write(self, key: Tensor, value: Tensor) -> Tensor:
        """Rows (..., width), uint8, of keys (..., D) and values (..., Dv)."""
        rows = torch.zeros((*key.shape[:-1], self.width), dtype=torch.uint8, device=key.device)
        for number, (at, part) in enumerate(((self.key_at, key), (self.value_at, value))):
            if self.dtype == torch.int8:
                scale = part.float().abs().amax(-1, keepdim=True) / LARGEST
                part = (part / scale.clamp_min(torch.finfo(torch.float32).tiny)).round().clamp(-LARGEST, LARGEST)
                rows[..., 4 * number : 4 * number + 4] = scale.view(torch.uint8)
            own = part.to(self.dtype).contiguous().view(torch.uint8)
            rows[..., at : at + own.shape[-1]] = own
        return rows

    def read(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Keys (..., D) and values (..., Dv) of rows (..., width), in working precision."""
        found = []
        for number, (at, dim) in enumerate(((self.key_at, self.dim), (self.value_at, self.value_dim))):
            own = _numbers(rows, at, dim, self.dtype).to(self.working)
            found.append(own * _numbers(rows, 4 * number, 1, torch.float32) if self.dtype == torch.int8 else own)
        return found[0], found[1]


def _numbers(rows: Tensor, at: int, count: int, dtype: torch.dtype) -> Tensor:
    found: Tensor = rows[..., at : at + count * dtype.itemsize].contiguous().view(dtype)
    return found


class LeafFile:
    """A file without a name, which goes with this object."""

    def __init__(self, folder: str) -> None:
        file = tempfile.TemporaryFile(dir=folder, buffering=0)  # noqa: SIM115 - it lives as long as this
        weakref.finalize(self, file.close)
        self.descriptor = file.fileno()

    def write(self, at: int, data: memoryview) -> None:
        """Write bytes at a place."""
        while data:
            written = os.pwrite(self.descriptor, data, at)
            data, at = data[written:], at + written


class Leaves:
    """The keys and values of `count` sealed tokens, for H heads in a row.

    A fork leaves parent and child with one file. The child moves to a file of its own before it first writes. So does
    the parent before it writes over rows that the child reads: the first `shared` ones.
    """

    def __init__(self, how: Held, form: Form, heads: int, device: torch.device) -> None:
        self.how, self.form, self.count = how, form, 0
        self.held = torch.zeros((0, heads, CHUNK, form.width), dtype=torch.uint8, device=device)
        self.shared: float = 0
        self._file = None if how.folder is None else LeafFile(how.folder)
        if self._file is not None:
            _IN_FILES.add(self)

    def make_room(self, count: int) -> None:
        """Make room for so many tokens in all, to be written now; `OSError` where the file finds none, and nothing has
        changed.
        """
        if self.count < self.shared:
            self._move()
        before, held = self.held.shape[0], self.held
        chunks = -(-count // CHUNK)
        if chunks <= before:
            return
        if self._file is None:
            self.held = held.new_empty((room_for(chunks, before, least=1), *held.shape[1:]))
            self.held[:before] = held
            return
        size = held.shape[1] * CHUNK * self.form.width
        try:
            for chunk in range(before, chunks):
                self._file.write(chunk * size, memoryview(bytes(size)))
            mapped = mmap.mmap(self._file.descriptor, chunks * size)
        except OSError as error:
            raise OSError(
                error.errno,
                f"folder: expected room for {(chunks - before) * size} more bytes of leaves in {self.how.folder}, got "
                f"{error.strerror}; free some, or name another folder",
            ) from None
        self.held = torch.frombuffer(mapped, dtype=torch.uint8).view(chunks, *held.shape[1:])

    def append(self, key: Tensor, value: Tensor) -> None:
        """Add tokens: keys (B, Hkv, N, D) and values."""
        self._add(self.form.write(key, value).flatten(0, 1))

    def rows(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Keys (H, stop - start, D) and values in working precision."""
        first, last = start // CHUNK, -(-stop // CHUNK)
        some = self.held[first:last].transpose(0, 1).flatten(1, 2)
        return self.form.read(some[:, start - first * CHUNK : stop - first * CHUNK])

    def take(self, heads: slice, index: Tensor) -> tuple[Tensor, Tensor]:
        """Keys (h, ..., D) and values of some heads at index (h, ...), in working precision."""
        count, _, width = self.held.shape[1:]
        head = torch.arange(count, device=index.device)[heads].view(-1, *[1] * (index.dim() - 1))
        flat = (index // CHUNK * count + head) * CHUNK + index % CHUNK
        rows = self.held.view(-1, width).index_select(0, flat.flatten())
        return self.form.read(rows.view(*index.shape, width))

    def select(self, heads: Tensor) -> Leaves:
        """The heads of these numbers, in memory or a file of their own."""
        found = Leaves(self.how, self.form, len(heads), self.held.device)
        found.make_room(self.count)
        for start in range(0, self.count, CHUNK):
            found._add(self.held[start // CHUNK, heads, : self.count - start])
        return found

    def bytes(self) -> int:
        """Memory held; files are not counted."""
        return 0 if self._file is not None else self.held.numel()

    def written(self) -> Tensor:
        """All rows, (H, count, width), in memory that they may share."""
        return self.held[: -(-self.count // CHUNK)].transpose(0, 1).flatten(1, 2)[:, : self.count]

    @staticmethod
    def of(how: Held, form: Form, written: Tensor) -> Leaves:
        """The leaves of such rows."""
        found = Leaves(how, form, written.shape[0], written.device)
        found._add(written)
        return found

    def __deepcopy__(self, memo: dict[int, Any]) -> Leaves:
        return self.select(torch.arange(self.held.shape[1], device=self.held.device))

    def _add(self, rows: Tensor) -> None:
        """Add rows (H, N, width)."""
        first, total = self.count, self.count + rows.shape[1]
        self.make_room(total)
        for start in range(first // CHUNK * CHUNK, total, CHUNK):
            low, high = max(start, first), min(start + CHUNK, total)
            own = rows[:, low - first : high - first]
            if self._file is None:
                self.held[start // CHUNK, :, low - start : high - start] = own
                continue
            # Through the file: where a disk is full after all, that is an error, and a write to memory no longer one.
            for head, data in enumerate(own.contiguous().flatten(1).numpy()):
                place = (start // CHUNK * self.held.shape[1] + head) * CHUNK + low - start
                self._file.write(place * self.form.width, memoryview(data))
        self.count = total

    def _move(self) -> None:
        """Go on in a file of one's own."""
        own = copy.deepcopy(self)
        self.held, self._file, self.shared = own.held, own._file, 0


_IN_FILES: weakref.WeakSet[Leaves] = weakref.WeakSet()


def _before_fork() -> None:
    for leaves in _IN_FILES:
        leaves.shared = max(leaves.shared, leaves.count)


def _in_child() -> None:
    for leaves in _IN_FILES:
        leaves.shared = math.inf


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork, after_in_child=_in_child)
