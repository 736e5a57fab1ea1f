"""The keys that leave the lists of a sequence, and when."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fewkeys.core.graph import Columns
from fewkeys.core.inputs import Inputs
from fewkeys.core.precision import working


@dataclass(frozen=True, eq=False)
class Evicted:
    """The keys that each step absorbs: `index` (B, Hkv, steps, E) into the keys, valid where `real` is True."""

    key: Tensor
    value: Tensor
    index: Tensor
    real: Tensor

    @staticmethod
    def by_lists(inputs: Inputs, columns: Columns) -> Evicted:
        """The steps are the blocks after the first. A key leaves at the first block after its last list."""
        x, device = inputs, columns.index.device
        heads = (x.batch, x.kv_heads)
        block = torch.arange(x.keys, device=device) // columns.size
        number = torch.arange(columns.blocks, device=device)[:, None].expand_as(columns.index)
        last = block.expand(*heads, -1).scatter_reduce(
            -1, columns.index.flatten(2), number.masked_fill(~columns.used, 0).flatten(2), "amax"
        )
        leaves = (last + 1).clamp_max(columns.blocks)
        if x.valid is not None:
            leaves = leaves.masked_fill(~x.valid[:, None], columns.blocks)
        order = leaves.argsort(dim=-1, stable=True)
        count = torch.zeros((*heads, columns.blocks + 1), dtype=torch.int64, device=device)
        count = count.scatter_add_(-1, leaves, torch.ones_like(leaves))[..., :-1]
        start = count.cumsum(-1) - count
        place = torch.arange(max(1, int(count.max())), device=device)
        index = order.gather(-1, (start.unsqueeze(-1) + place).clamp_max(x.keys - 1).flatten(2))
        index, real = index.unflatten(-1, (columns.blocks, -1)), place < count.unsqueeze(-1)
        return Evicted(x.key, x.value, index[:, :, 1:], real[:, :, 1:])

    @property
    def steps(self) -> int:
        return self.index.shape[2]

    def at(self, step: int) -> tuple[Tensor, Tensor, Tensor]:
        """The keys and values of a step in working precision, zero where they are not real, and which are real."""
        real = self.real[:, :, step]
        # Only as many as this step needs: shapes must not depend on later tokens.
        places = torch.arange(1, real.shape[-1] + 1, device=real.device)
        width = int((real * places).max()) if real.numel() else 0
        index, real = self.index[:, :, step, :width], real[:, :, :width]
        key, value = (
            working(x.gather(2, index.unsqueeze(-1).expand(-1, -1, -1, x.shape[-1]))) * real.unsqueeze(-1)
            for x in (self.key, self.value)
        )
        return key, value, real
