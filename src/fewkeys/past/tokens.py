"""Stored keys and values with their positions."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fewkeys.core.fields import Fields


@dataclass(frozen=True, eq=False)
class Stretch(Fields):
    """`key` (B, Hkv, K, D) and `value` (B, Hkv, K, Dv) of the tokens at the places `first`, `first + 1`, ..."""

    first: int
    key: Tensor
    value: Tensor

    @staticmethod
    def empty(key: Tensor, value: Tensor) -> Stretch:
        """No tokens, for keys (B, Hkv, N, D) and values (B, Hkv, N, Dv)."""
        # New tensors: a view would keep the memory of all tokens alive.
        return Stretch(0, *(rows.new_empty((*rows.shape[:2], 0, rows.shape[3])) for rows in (key, value)))

    @property
    def count(self) -> int:
        return self.key.shape[2]

    @property
    def stop(self) -> int:
        """The place after the last token."""
        return self.first + self.key.shape[2]

    def followed_by(self, key: Tensor, value: Tensor) -> Stretch:
        """The stretch with further tokens."""
        return Stretch(self.first, torch.cat([self.key, key], 2), torch.cat([self.value, value], 2))

    def between(self, start: int, stop: int) -> Stretch:
        """The tokens at the places start .. stop - 1 that the stretch has."""
        start = min(max(start, self.first), self.stop)
        part = slice(start - self.first, max(0, stop - self.first))
        return Stretch(start, self.key[:, :, part], self.value[:, :, part])

    def tokens(self) -> Tokens:
        """The same tokens, each with its place."""
        place = torch.arange(self.first, self.stop, device=self.key.device).expand(self.key.shape[:3])
        return Tokens(self.key, self.value, place, torch.ones_like(place, dtype=torch.bool))


@dataclass(frozen=True, eq=False)
class Tokens(Fields):
    """`key` (B, Hkv, K, D), `value` (B, Hkv, K, Dv), `place` (B, Hkv, K) in the sequence, and which are `real`."""

    key: Tensor
    value: Tensor
    place: Tensor
    real: Tensor

    @property
    def count(self) -> int:
        return self.place.shape[2]

    def without(self, others: Tokens) -> Tokens:
        """The same tokens; those that `others` have, too, are no longer marked as real."""
        shared = (self.place.unsqueeze(-1) == others.place.unsqueeze(-2)) & others.real.unsqueeze(-2)
        return replace(self, real=self.real & ~shared.any(-1))
