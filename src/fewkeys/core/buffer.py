"""Rows that grow at their end, in memory that is taken half as large again whenever it is full."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

LEAST = 256
"""Rows that there is room for at first."""


def room_for(count: int, room: int, least: int = LEAST) -> int:
    """How many rows to have room for, so that `count` fit, where there is `room` now."""
    return room if count <= room else max(least, count, room + room // 2)


def widened(held: Tensor, room: int) -> Tensor:
    """Rows (..., R, X) in room for more of them; what is new is zero."""
    more = held.new_zeros((*held.shape[:-2], room, held.shape[-1]))
    more[..., : held.shape[-2], :] = held
    return more


@dataclass(eq=False)
class Buffer:
    """`rows` (..., count, X) of `held` (..., capacity, X). Appending costs O(1) a row, on average.

    `least`: rows that there is room for at first.
    """

    held: Tensor
    count: int = 0
    least: int = LEAST

    @staticmethod
    def of(rows: Tensor) -> Buffer:
        """A buffer that holds a copy of rows (..., N, X)."""
        found = Buffer(rows[..., :0, :])
        found.append(rows)
        return found

    @property
    def rows(self) -> Tensor:
        return self.held[..., : self.count, :]

    def append(self, rows: Tensor) -> None:
        """Add rows (..., N, X) at the end."""
        total = self.count + rows.shape[-2]
        if (room := room_for(total, self.held.shape[-2], self.least)) != self.held.shape[-2]:
            self.held = widened(self.held, room)
        self.held[..., self.count : total, :] = rows
        self.count = total

    def drop(self, some: int, after: int = 0) -> None:
        """Forget `some` rows after the first few."""
        left = torch.cat([self.rows[..., :after, :], self.rows[..., after + some :, :]], -2)
        self.count -= some
        room = room_for(self.count, 0, self.least)
        if 2 * room < self.held.shape[-2]:
            self.held = widened(left, room)
        else:
            self.held[..., : self.count, :] = left

    def select(self, index: Tensor) -> Buffer:
        """The sequences `index` of the first dimension."""
        return Buffer(self.held[index], self.count, self.least)
