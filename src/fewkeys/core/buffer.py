"""Growing arrays of rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

LEAST = 256
"""The first capacity in rows."""
SPARE = 8
"""A larger capacity is the old one plus 1 / SPARE of it."""


@dataclass(eq=False)
class Buffer:
    """`rows` (..., count, X) in `storage` (..., capacity, X). Appending a row moves SPARE others, on average.

    least: the first capacity.
    """

    storage: Tensor
    count: int = 0
    least: int = LEAST

    @property
    def rows(self) -> Tensor:
        return self.storage.narrow(-2, 0, self.count)

    def make_room(self, count: int) -> None:
        """Make room for `count` rows in all."""
        room = self.storage.shape[-2]
        if count > room:
            # Many rows at once get no spare room: the prompt may be the whole stream.
            self.storage = self._moved(self.rows, max(self.least, count, room + room // SPARE))

    def append(self, rows: Tensor) -> None:
        """Add rows (..., N, X) at the end."""
        total = self.count + rows.shape[-2]
        self.make_room(total)
        self.storage.narrow(-2, self.count, rows.shape[-2]).copy_(rows)
        self.count = total

    def holding(self, rows: Tensor) -> Buffer:
        """A buffer of the same kind with a copy of rows (..., N, X), in new memory."""
        return Buffer(self._moved(rows, max(rows.shape[-2], self.storage.shape[-2])), rows.shape[-2], self.least)

    def __deepcopy__(self, memo: dict[int, Any]) -> Buffer:
        return self.holding(self.rows)

    @staticmethod
    def _moved(rows: Tensor, room: int) -> Tensor:
        storage = rows.new_empty((*rows.shape[:-2], room, rows.shape[-1]))
        storage[..., : rows.shape[-2], :] = rows
        return storage
