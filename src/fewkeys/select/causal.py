"""Strictly causal selection of the heaviest keys of the past.

When a block of absolute positions is complete, its keys are scored together with the keys kept so far, and the best
`count` stay for the queries of the next block; evicted keys never return. Free places of a list go to the block's own
keys in order, under the causal mask: a budget of all keys is exact attention. Cost O(n (count + block)) scores; memory
besides the lists does not grow with n.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import pad

from fewkeys.core.graph import Columns, Graph
from fewkeys.core.inputs import Inputs
from fewkeys.core.precision import working
from fewkeys.core.rows import marked_places
from fewkeys.select.base import top_places

CAUSAL_BLOCK = 32
"""Tokens of a block."""


def running_top(
    inputs: Inputs,
    count: int,
    score: Callable[[Tensor, Tensor], Tensor],
    offer: Callable[[Tensor, Tensor], None] = lambda key, real: None,
) -> Graph:
    """Every block of queries keeps the `count` best of the keys before it.

    `score(key, index)`: the present scores (B, Hkv, M) of keys (B, Hkv, M, D) at places `index` (B, Hkv, M).
    `offer(key, real)`: called for each block of keys (B, Hkv, M, D), of which those `real` (B, M) count, in order.
    """
    x, keys, count = inputs, working(inputs.key.detach()), min(count, inputs.keys)
    valid = keys.new_ones((x.batch, x.keys), dtype=torch.bool) if x.valid is None else x.valid
    index = torch.zeros((x.batch, x.kv_heads, 0), dtype=torch.long, device=keys.device)
    used, lists, start = index.bool(), list[tuple[Tensor, Tensor]](), 0
    for block in range((x.offset + x.queries - 1) // CAUSAL_BLOCK + 1):
        complete = min(block * CAUSAL_BLOCK, x.keys)
        if start < complete:
            new = torch.arange(start, complete, device=keys.device).expand(x.batch, x.kv_heads, -1)
            real = valid[:, start:complete]
            offer(keys[:, :, start:complete], real)
            index, used = torch.cat([index, new], -1), torch.cat([used, real[:, None].expand_as(new)], -1)
            if index.shape[-1] > count:
                present = score(keys.take_along_dim(index.unsqueeze(-1), 2), index)
                place, _ = top_places(present.masked_fill(~used, -torch.inf), count)
                index, used = index.gather(-1, place), used.gather(-1, place)
            start = complete
        if block >= x.offset // CAUSAL_BLOCK:
            lists.append(_filled(x, index, used, complete, count))
    index, used = (torch.stack(parts, 2) for parts in zip(*lists, strict=True))
    return Graph(x, columns=Columns(index, used, CAUSAL_BLOCK))


def _filled(x: Inputs, index: Tensor, used: Tensor, complete: int, count: int) -> tuple[Tensor, Tensor]:
    """The list filled up to `count` with the block's own real keys, in order; and which places are used."""
    last_keys = torch.arange(complete, complete + CAUSAL_BLOCK, device=index.device).expand(x.batch, -1)
    real, last_keys = last_keys < x.keys, last_keys.clamp_max(x.keys - 1)
    if x.valid is not None:
        real = real & x.valid.gather(-1, last_keys)
        order = marked_places(real, least=CAUSAL_BLOCK)
        last_keys, real = last_keys.gather(-1, order), real.gather(-1, order)
    fill = (0, count - index.shape[-1] - CAUSAL_BLOCK)
    last_keys, real = (pad(rows, fill)[:, None].expand(-1, x.kv_heads, -1) for rows in (last_keys, real))
    return torch.cat([index, last_keys], -1), torch.cat([used, real], -1)
