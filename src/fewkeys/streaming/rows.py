"""Keys and values at known positions: what a stream holds exactly."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Rows:
    """`key` (B, Hkv, K, D), `value` (B, Hkv, K, Dv), their `place` (B, Hkv, K) in the stream, and which are `real`."""

    key: Tensor
    value: Tensor
    place: Tensor
    real: Tensor

    @staticmethod
    def empty(key: Tensor, value: Tensor) -> Rows:
        """None, in the shape of keys (B, Hkv, N, D) and values (B, Hkv, N, Dv)."""
        place = torch.zeros((*key.shape[:2], 0), dtype=torch.int64, device=key.device)
        return Rows(key[:, :, :0], value[:, :, :0], place, place.bool())

    @staticmethod
    def at(start: int, key: Tensor, value: Tensor, real: Tensor) -> Rows:
        """Keys and values at places start, start + 1, ...; `real` (B, N)."""
        place = torch.arange(start, start + key.shape[2], device=key.device).expand(key.shape[:3])
        return Rows(key, value, place, real[:, None].expand(key.shape[:3]))

    @property
    def count(self) -> int:
        return self.place.shape[2]

    def __add__(self, other: Rows) -> Rows:
        return Rows(
            torch.cat([self.key, other.key], 2),
            torch.cat([self.value, other.value], 2),
            torch.cat([self.place, other.place], 2),
            torch.cat([self.real, other.real], 2),
        )

    def __getitem__(self, part: slice) -> Rows:
        return Rows(self.key[:, :, part], self.value[:, :, part], self.place[:, :, part], self.real[:, :, part])

    def take(self, index: Tensor) -> Rows:
        """The rows at index (B, Hkv, M)."""
        wide = index.unsqueeze(-1)
        return Rows(
            self.key.gather(2, wide.expand(-1, -1, -1, self.key.shape[-1])),
            self.value.gather(2, wide.expand(-1, -1, -1, self.value.shape[-1])),
            self.place.gather(2, index),
            self.real.gather(2, index),
        )

    def but(self, others: Rows) -> Rows:
        """The same rows, those that `others` hold too no longer real."""
        shared = (self.place.unsqueeze(-1) == others.place.unsqueeze(-2)) & others.real.unsqueeze(-2)
        return Rows(self.key, self.value, self.place, self.real & ~shared.any(-1))

    def within(self, start: int, stop: int) -> Rows:
        """The same rows, those at places outside start .. stop - 1 no longer real."""
        return Rows(self.key, self.value, self.place, self.real & (self.place >= start) & (self.place < stop))
