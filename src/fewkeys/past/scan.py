"""The summaries of a whole sequence, one block of queries after the other."""

from collections.abc import Iterator

import torch
from torch import Tensor

from fewkeys.core.graph import Columns
from fewkeys.core.inputs import Inputs
from fewkeys.core.precision import working
from fewkeys.past.running import RunningQueries
from fewkeys.past.summary import Summary


def scan(
    count: int, inputs: Inputs, columns: Columns, has_query: Tensor | None, *, tilted: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """The rows (B, Hkv, blocks, count, D + Dv), the excess and the size (B, Hkv, blocks, count) of a `Summary` for each
    block of queries: `s_b = absorb(s_(b-1), evicted_b)` for every block b after the first.

    evicted_b are the keys whose last list, or own block if that is later, is that of block b - 1; the moments are those
    of all queries before b. has_query (B, Nq): False for queries that do not count in them; None: all count. `tilted`:
    as `Summary.absorb`. Sequential in the blocks. Cost O((count + E)^2 (D + Dv)) per block and head for E evicted keys.
    """
    x, size = inputs, columns.size
    no_key = working(x.key[:, :, :0])
    summary, queries = Summary.empty(count, no_key, working(x.value[:, :, :0])), RunningQueries.empty(no_key)
    scaled = working(x.query[:, :, : (columns.blocks - 1) * size].detach()).unflatten(1, (x.kv_heads, -1)) * x.scale
    summaries = [summary]
    for step, (key, value, real) in enumerate(_evicted(x, columns)):
        part = slice(step * size, (step + 1) * size)
        queries = queries.add(scaled[:, :, :, part], None if has_query is None else has_query[:, part])
        if key.shape[2]:
            summary = summary.absorb(key, value, real, queries.moments(), tilted=tilted)
        summaries.append(summary)
    rows, excess, sizes = zip(*((s.rows, s.excess, s.size) for s in summaries), strict=True)
    return torch.stack(rows, 2), torch.stack(excess, 2), torch.stack(sizes, 2)


def _evicted(inputs: Inputs, columns: Columns) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """For every block after the first, the keys (B, Hkv, E, D) that leave, their values, and which of them are real
    (B, Hkv, E): the others are zero. In working precision.
    """
    x, blocks, device = inputs, columns.blocks, columns.index.device
    heads = (x.batch, x.kv_heads)
    own_block = torch.arange(x.keys, device=device) // columns.size
    number = torch.arange(blocks, device=device)[:, None].expand_as(columns.index)
    last = own_block.expand(*heads, -1).scatter_reduce(
        -1, columns.index.flatten(2), number.masked_fill(~columns.used, 0).flatten(2), "amax"
    )
    leaves = (last + 1).clamp_max(blocks)
    if x.valid is not None:
        leaves = leaves.masked_fill(~x.valid[:, None], blocks)
    order = leaves.argsort(dim=-1, stable=True)
    counts = torch.zeros((*heads, blocks + 1), dtype=torch.int64, device=device)
    counts = counts.scatter_add_(-1, leaves, torch.ones_like(leaves))[..., :-1]
    start = counts.cumsum(-1) - counts
    for block in range(1, blocks):
        count, first = counts[..., block, None], start[..., block, None]
        # Only as many as this block needs: shapes must not depend on later tokens.
        place = torch.arange(int(count.max()), device=device)
        index, real = order.gather(-1, (first + place).clamp_max(x.keys - 1)), place < count
        key, value = (
            working(rows.take_along_dim(index.unsqueeze(-1), 2)) * real.unsqueeze(-1) for rows in (x.key, x.value)
        )
        yield key, value, real
