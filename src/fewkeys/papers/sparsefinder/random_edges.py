"""Random keys for every query."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fewkeys.core.graph import Columns, Graph
from fewkeys.core.inputs import Inputs
from fewkeys.core.work import Work
from fewkeys.select.base import Counted
from fewkeys.select.controls import uniform


@dataclass(frozen=True)
class RandomEdges(Counted):
    """Every query keeps `count` of the keys that it may see, drawn uniformly without replacement.

    The control for edges as `RandomKeys`, whose keys all queries share, is the control for keys. Query heads that
    share their keys share the draw. It comes from the call's generator. Cost O(n (count D + count^2)).
    """

    causal = True

    def select(self, inputs: Inputs) -> Graph:
        x, device = inputs, inputs.key.device
        real = torch.ones((x.batch, x.keys), dtype=torch.bool, device=device) if x.valid is None else x.valid
        seen = torch.full((x.queries,), x.keys, device=device)
        if x.is_causal:
            seen = (torch.arange(x.queries, device=device) + x.offset + 1).clamp_max(x.keys)
        total = real.cumsum(-1)[:, seen - 1].unsqueeze(1)
        rank = distinct(x, total, x.queries, self.count)
        # The r-th real key, wherever the padding stands.
        order = real.to(torch.int8).argsort(dim=-1, descending=True, stable=True)
        index = order[:, None].expand(-1, x.kv_heads, -1).gather(-1, rank.clamp_min(0).flatten(2)).view_as(rank)
        return Graph(x, columns=Columns(index, rank >= 0, 1))

    def work(self, inputs: Inputs) -> Work:
        # Each draw is compared with those before it.
        return Work(float(self.count), float(self.count**2) * inputs.queries / inputs.keys)


def distinct(inputs: Inputs, total: Tensor, rows: int, count: int) -> Tensor:
    """For every sequence, key head and row, `count` distinct numbers of 0 .. total - 1, each subset equally likely.

    `total` broadcasts to (B, 1, rows). Returns int64 (B, Hkv, rows, count), -1 in unused places if a total is below
    `count`. Floyd's algorithm: O(count^2) per row for any total.
    """
    draws = uniform(inputs, (inputs.batch, inputs.kv_heads, rows, count)).double()
    chosen = torch.full(draws.shape, -1, dtype=torch.int64, device=draws.device)
    for step in range(count):
        last = total - count + step
        number = (draws[..., step] * (last + 1)).long()
        # A number that is taken is replaced by the largest, which cannot be taken yet.
        taken = (chosen[..., :step] == number.unsqueeze(-1)).any(-1)
        chosen[..., step] = torch.where(taken, last, number).where(last >= 0, -1)
    return chosen
