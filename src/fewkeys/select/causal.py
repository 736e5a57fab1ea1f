"""Strictly causal selection of the heaviest keys of the past.

Queries are taken in blocks. A block's list is chosen among the keys that were complete before the block began, by
scores that saw nothing later: each time a block of keys is complete, the keys kept so far and the new ones are scored
together and the best `count` stay. While fewer than `count` keys are complete, the free places of the list go to the
block's own keys in order, under the causal mask; so a budget of all keys is exact attention. Cost O(n (count + block))
scores, memory independent of n besides the lists.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import pad

from fewkeys.graph import Columns, Graph
from fewkeys.inputs import Inputs
from fewkeys.select.base import CAUSAL_BLOCK

Score = Callable[[Tensor, int], Tensor]
"""(candidate positions (B, Hkv, M), end of the completed keys) -> scores (B, Hkv, M)."""


def running_top(inputs: Inputs, score: Score, count: int) -> Graph:
    """The graph in which every block of queries keeps the `count` best keys of its completed past."""
    x, device, size = inputs, inputs.query.device, CAUSAL_BLOCK
    count = min(count, x.keys)
    kept = torch.zeros((x.batch, x.kv_heads, 0), dtype=torch.int64, device=device)
    used = torch.zeros(kept.shape, dtype=torch.bool, device=device)
    lists, flags, done = [], [], 0
    for start in range(0, x.queries, size):
        # Everything before the block's first query position is complete; its own key is not.
        complete = min(start + x.offset, x.keys)
        while done < complete:
            stop = min(done + size, complete)
            kept, used = _absorb(x, score, kept, used, done, stop, count)
            done = stop
        index, flag = _fill(x, kept, used, complete, count)
        lists.append(index)
        flags.append(flag)
    return Graph(x, columns=Columns(torch.stack(lists, 2), torch.stack(flags, 2), size))


def _absorb(
    x: Inputs, score: Score, kept: Tensor, used: Tensor, start: int, stop: int, count: int
) -> tuple[Tensor, Tensor]:
    new = torch.arange(start, stop, device=kept.device).expand(x.batch, x.kv_heads, -1)
    real = torch.ones_like(new, dtype=torch.bool)
    if x.valid is not None:
        real = x.valid[:, None, start:stop].expand_as(new)
    index, used = torch.cat([kept, new], -1), torch.cat([used, real], -1)
    if index.shape[-1] <= count:
        return index, used
    top = score(index, stop).masked_fill(~used, -torch.inf).topk(count, -1).indices.sort(-1).values
    return index.gather(-1, top), used.gather(-1, top)


def _fill(x: Inputs, kept: Tensor, used: Tensor, complete: int, count: int) -> tuple[Tensor, Tensor]:
    """The list with its free places given to the block's own real keys, in order; lists are `count` long."""
    own = torch.arange(complete, complete + CAUSAL_BLOCK, device=kept.device)
    real = (own < x.keys).expand(x.batch, -1)
    own = own.clamp_max(x.keys - 1).expand(x.batch, -1)
    if x.valid is not None:
        real = real & x.valid.gather(-1, own)
        order = real.to(torch.int8).argsort(dim=-1, descending=True, stable=True)
        own, real = own.gather(-1, order), real.gather(-1, order)
    free = count - kept.shape[-1]
    missing = max(0, free - CAUSAL_BLOCK)
    own, real = pad(own, (0, missing))[:, :free], pad(real, (0, missing))[:, :free]
    shape = (-1, x.kv_heads, -1)
    return torch.cat([kept, own[:, None].expand(shape)], -1), torch.cat([used, real[:, None].expand(shape)], -1)
