"""Sorted blocks: queries and keys are ordered and cut into equally many blocks; block i attends to block i."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from experiments.peers.parts import partial, rows
from experiments.sparsefinder.baselines.sorted_lsh import gray_rank
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Cut:
    """Rows in the order (B, H, N), cut into `count` blocks of `size`; the last ones may be empty at their end."""

    order: Tensor
    count: int

    @property
    def size(self) -> int:
        return -(-self.order.shape[-1] // self.count)

    @property
    def spare(self) -> int:
        """Places without a row."""
        return self.count * self.size - self.order.shape[-1]

    def blocks(self, x: Tensor) -> Tensor:
        """(B, H, N, D) as (B H, count, size, D); zeros at places without a row."""
        ordered = rows(x, self.order)
        if self.spare:
            ordered = torch.nn.functional.pad(ordered, (0, 0, 0, self.spare))
        return ordered.flatten(0, 1).unflatten(1, (self.count, self.size))

    def bias(self) -> Tensor | None:
        """-inf (1, count, 1, size) at places without a row; None if there are none."""
        if not self.spare:
            return None
        place = torch.arange(self.count * self.size) >= self.order.shape[-1]
        return torch.zeros(place.shape).masked_fill(place, -torch.inf).view(1, self.count, 1, self.size)

    def back(self, x: Tensor) -> Tensor:
        """(B H, count, size, ...) as (B, H, N, ...), in the order of the sequence."""
        flat = x.flatten(1, 2)[:, : self.order.shape[-1]].unflatten(0, self.order.shape[:2])
        place = self.order.argsort(-1)
        if flat.ndim == 3:
            return flat.gather(2, place)
        return rows(flat, place)

    def number(self) -> Tensor:
        """The block (B, H, N) of every row, in the order of the sequence."""
        return self.order.argsort(-1) // self.size


def hashed(q: Tensor, k: Tensor, size: int, planes: int, generator: torch.Generator) -> tuple[Cut, Cut]:
    """Both ordered by one angular hash along the Gray code, in blocks of `size` keys."""
    normals = torch.randn(q.shape[-1], planes, generator=generator)
    count = -(-k.shape[2] // size)
    first, second = (Cut(gray_rank(x, normals).argsort(dim=-1, stable=True), count) for x in (q, k))
    return first, second


def beside(q: Tensor, k: Tensor, v: Tensor, cut: tuple[Cut, Cut], scale: float) -> tuple[Tensor, Tensor]:
    """Attention of every query to its block of keys, with the sums of `partial`."""
    mine, yours = cut
    out, total = partial(mine.blocks(q), yours.blocks(k), yours.blocks(v), scale, yours.bias())
    return mine.back(out), mine.back(total)
