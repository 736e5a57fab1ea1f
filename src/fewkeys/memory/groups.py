"""Groups of a stream: sequences and key heads with the same plan and padding.

Their memory receives real tokens only, so outputs do not depend on padding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fewkeys.memory.coded import Coded
from fewkeys.memory.constant import Constant

Memory = Coded | Constant
"""Every change returns a new memory. The old one, which may share tensors with it, must not be used again."""
Index = tuple[Tensor, Tensor, Tensor]
Gaps = tuple[tuple[int, int], ...]
"""Ranges of padding: the first place, and the place after the last."""


@dataclass(frozen=True, eq=False)
class Group:
    """The sequences `rows` (M,) and key heads `heads` (H,) of plan number `plan`, their padding and memory."""

    plan: int
    heads: Tensor
    rows: Tensor
    gaps: Gaps
    memory: Memory

    def by_padding(self, real: Tensor) -> list[Group]:
        """The group, cut where rows of `real` (B, N) differ."""
        kinds, kind = real[self.rows].unique(dim=0, return_inverse=True)
        if len(kinds) == 1:
            return [self]
        parts = [(kind == number).nonzero().squeeze(-1) for number in range(len(kinds))]
        return [replace(self, rows=self.rows[part], memory=self.memory.select(part)) for part in parts]

    def places(self, key: Tensor, real: Tensor | None, ratio: int) -> tuple[Index, Index]:
        """The indices of the group's real tokens in keys (B, Hkv, N, D) and in queries (B, ratio Hkv, N, D)."""
        inside = torch.arange(key.shape[2], device=key.device)
        inside = inside if real is None else inside[real[self.rows[0]]]
        heads = (self.heads[:, None] * ratio + torch.arange(ratio, device=self.heads.device)).flatten()
        rows = self.rows[:, None, None]
        return (rows, self.heads[:, None], inside), (rows, heads[:, None], inside)

    def padded(self, real: Tensor, first: int) -> Group:
        """The group with the padding of further tokens, `real` (B, N), from place `first` on."""
        edges = torch.nn.functional.pad(~real[self.rows[0]], (1, 1)).int().diff().nonzero().squeeze(-1) + first
        before, after = self.gaps, tuple(map(tuple, edges.view(-1, 2).tolist()))
        if before and after and before[-1][1] == after[0][0]:  # one gap
            before, after = before[:-1], ((before[-1][0], after[0][1]), *after[1:])
        return replace(self, gaps=before + after)

    def crop(self, length: int) -> Group:
        """The group without the tokens from place `length` on."""
        gaps = tuple((start, min(stop, length)) for start, stop in self.gaps if start < length)
        return replace(self, gaps=gaps, memory=self.memory.crop(real_tokens(self.gaps, length)))

    def select(self, index: Tensor) -> Group | None:
        """The sequences `index` of the batch; None if the group has none of them."""
        at = (index[:, None] == self.rows).nonzero()
        return replace(self, rows=at[:, 0], memory=self.memory.select(at[:, 1])) if len(at) else None


def real_tokens(gaps: Gaps, length: int) -> int:
    """The number of real tokens among the first `length`."""
    return length - sum(min(stop, length) - start for start, stop in gaps if start < length)


def checked_gaps(gaps: Sequence[Sequence[int]], length: int) -> Gaps:
    """The gaps of a file; `ValueError` unless they rise within `length` places."""
    edges = [place for gap in gaps for place in gap]
    if any(len(gap) != 2 for gap in gaps) or edges != sorted({*edges}) or not all(0 <= e <= length for e in edges):
        raise ValueError(f"expected padding at places that rise, of {length}, got {gaps}")
    return tuple((start, stop) for start, stop in gaps)
