"""Keys and values at known positions: what is held exactly."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Tokens:
    """`key` (B, Hkv, K, D), `value` (B, Hkv, K, Dv), `place` (B, Hkv, K) in the sequence, and which are `real`."""

    key: Tensor
    value: Tensor
    place: Tensor
    real: Tensor

    @staticmethod
    def empty(key: Tensor, value: Tensor) -> Tokens:
        """None, in the shape of keys (B, Hkv, N, D) and values (B, Hkv, N, Dv)."""
        place = torch.zeros((*key.shape[:2], 0), dtype=torch.int64, device=key.device)
        # No views: they would hold the memory of all tokens for as long as they live.
        none = [part.new_empty((*part.shape[:2], 0, part.shape[3])) for part in (key, value)]
        return Tokens(none[0], none[1], place, place.bool())

    @staticmethod
    def at(start: int, key: Tensor, value: Tensor, real: Tensor | None = None) -> Tokens:
        """Keys and values at places start, start + 1, ...; `real` (B, N), None: all."""
        place = torch.arange(start, start + key.shape[2], device=key.device).expand(key.shape[:3])
        real = torch.ones_like(place, dtype=torch.bool) if real is None else real[:, None].expand(key.shape[:3])
        return Tokens(key, value, place, real)

    @property
    def count(self) -> int:
        return self.place.shape[2]

    def __add__(self, other: Tokens) -> Tokens:
        return Tokens(
            torch.cat([self.key, other.key], 2),
            torch.cat([self.value, other.value], 2),
            torch.cat([self.place, other.place], 2),
            torch.cat([self.real, other.real], 2),
        )

    def __getitem__(self, part: slice) -> Tokens:
        return Tokens(self.key[:, :, part], self.value[:, :, part], self.place[:, :, part], self.real[:, :, part])

    def take(self, index: Tensor) -> Tokens:
        """The tokens at index (B, Hkv, M)."""
        wide = index.unsqueeze(-1)
        return Tokens(
            self.key.gather(2, wide.expand(-1, -1, -1, self.key.shape[-1])),
            self.value.gather(2, wide.expand(-1, -1, -1, self.value.shape[-1])),
            self.place.gather(2, index),
            self.real.gather(2, index),
        )

    def earliest(self, count: int) -> Tokens:
        """The first `count` real ones, in their order; where there are fewer, others that are not real follow."""
        return self.take((~self.real).to(torch.int8).argsort(dim=-1, stable=True)[..., :count])

    def moved(self, by: int) -> Tokens:
        """The same tokens, so many places later."""
        return replace(self, place=self.place + by)

    def but(self, others: Tokens) -> Tokens:
        """The same tokens, those that `others` hold too no longer real."""
        shared = (self.place.unsqueeze(-1) == others.place.unsqueeze(-2)) & others.real.unsqueeze(-2)
        return replace(self, real=self.real & ~shared.any(-1))

    def before(self, place: int) -> Tokens:
        """The same tokens, those from `place` on no longer real."""
        return replace(self, real=self.real & (self.place < place))


def unheld(leaving: Sequence[Tokens], kept: Sequence[Tokens], before: int) -> Tokens:
    """The leaving tokens at places before `before` that are kept nowhere, each once; the others are not real.

    They stand in the order of their places: among equals the first to come leads, whatever list it comes from.
    """
    found: list[Tokens] = []
    for tokens in leaving:
        tokens = tokens.before(before)
        for other in (*kept, *found):
            tokens = tokens.but(other)
        found.append(tokens)
    if len(found) == 1:
        return found[0]
    tokens = sum(found[1:], found[0])
    last = torch.iinfo(torch.int64).max
    return tokens.take(tokens.place.masked_fill(~tokens.real, last).argsort(dim=-1, stable=True))
