"""Growing arrays of rows, in memory or in an unnamed file."""

from __future__ import annotations

import math
import mmap
import os
import tempfile
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

LEAST = 256
"""The first capacity in rows."""
SPARE = 8
"""A larger capacity is the old one plus 1 / SPARE of it."""
ZEROS = bytes(2**20)

_forks = 0


def _before_fork() -> None:
    global _forks
    _forks += 1


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork)


@dataclass(eq=False)
class Buffer:
    """`rows` (..., count, X) in `held` (..., capacity, X). Appending a row moves SPARE others, on average.

    `least`: the first capacity. `folder`: for a file with `held`, removed with the buffer; None: in memory. After a
    fork, parent and child move to separate files before they write.
    """

    held: Tensor
    count: int = 0
    least: int = LEAST
    folder: str | None = None
    _forks: int = field(default_factory=lambda: _forks)

    @property
    def rows(self) -> Tensor:
        return self.held.narrow(-2, 0, self.count)

    def make_room(self, count: int) -> None:
        """Make room for `count` rows in all, before writing them. `OSError`, without a change, on a full disk."""
        room = self.held.shape[-2]
        if count > room:
            # Many rows at once get no spare room: the prompt may be the whole stream.
            self._move(max(self.least, count, room + room // SPARE))
        elif self.folder is not None and self._forks != _forks:
            self._move(room)

    def append(self, rows: Tensor) -> None:
        """Add rows (..., N, X) at the end."""
        total = self.count + rows.shape[-2]
        self.make_room(total)
        self.held.narrow(-2, self.count, rows.shape[-2]).copy_(rows)
        self.count = total

    def holding(self, rows: Tensor) -> Buffer:
        """A buffer of the same kind with a copy of rows (..., N, X), in new memory or a new file."""
        shape = (*rows.shape[:-2], max(rows.shape[-2], self.held.shape[-2]), rows.shape[-1])
        storage = allocated(shape, rows, self.folder)
        storage[..., : rows.shape[-2], :] = rows
        return Buffer(storage, rows.shape[-2], self.least, self.folder)

    def bytes(self) -> int:
        """Bytes in memory; files do not count."""
        return 0 if self.folder is not None else self.held.numel() * self.held.itemsize

    def __deepcopy__(self, memo: dict[int, Any]) -> Buffer:
        return self.holding(self.rows)

    def _move(self, room: int) -> None:
        storage = allocated((*self.held.shape[:-2], room, self.held.shape[-1]), self.held, self.folder)
        storage[..., : self.count, :] = self.rows
        self.held, self._forks = storage, _forks


def allocated(shape: tuple[int, ...], template: Tensor, folder: str | None) -> Tensor:
    """A tensor of undefined numbers, in memory or in a file of `folder` that is removed with it.

    The whole file is written, so that a full disk raises `OSError` here and does not crash the process later.
    """
    size = math.prod(shape) * template.itemsize
    if folder is None or not size:
        return template.new_empty(shape)
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            for at in range(0, size, len(ZEROS)):
                file.write(memoryview(ZEROS)[: size - at])
            file.flush()
            mapped = mmap.mmap(file.fileno(), size)
    except OSError as error:
        raise OSError(
            error.errno,
            f"folder: expected room for {size} more bytes in {folder}, got {error.strerror}; free some, or name "
            "another folder",
        ) from None
    return torch.frombuffer(mapped, dtype=template.dtype).view(shape)
