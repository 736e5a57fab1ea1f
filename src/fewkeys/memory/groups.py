"""Groups of a stream: sequences and key heads with the same plan and padding.

Their memory receives real tokens only, so outputs do not depend on padding.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fewkeys.memory.coded import Coded
from fewkeys.memory.constant import Constant

Memory = Coded | Constant
"""Every change returns a new memory. The old one, which may share tensors with it, must not be used again."""
Index = tuple[Tensor, Tensor, Tensor]


@dataclass(frozen=True, eq=False)
class Group:
    """The sequences `rows` (M,) and key heads `heads` (H,) of plan number `plan`, and their memory."""

    plan: int
    heads: Tensor
    rows: Tensor
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

    def select(self, index: Tensor) -> Group | None:
        """The sequences `index` of the batch; None if the group has none of them."""
        at = (index[:, None] == self.rows).nonzero()
        return replace(self, rows=at[:, 0], memory=self.memory.select(at[:, 1])) if len(at) else None
