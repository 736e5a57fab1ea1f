"""The summaries of a whole sequence, block by block."""

from collections.abc import Iterator

import torch
from torch import Tensor

from fewkeys.core.graph import Columns
from fewkeys.core.inputs import Inputs
from fewkeys.core.precision import working
from fewkeys.past.running import RunningQueries
from fewkeys.past.summary import Summary


def scan(
    count: int, inputs: Inputs, columns: Columns, has_query: Tensor, *, tilted: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """The rows (B, Hkv, blocks, count, D + Dv), the excess and the size (B, Hkv, blocks, count) of a `Summary` for each
    block of queries: `s_b = absorb(s_(b-1), evicted_b)` for every block b after the first.

    evicted_b are the keys in the list of block b - 1 that are not in that of block b; the moments are those of all
    queries before b that `has_query` (B, Nq) marks. `tilted`: as `Summary.absorb`. Sequential in the blocks. Cost
    O((count + E)^2 (D + Dv)) per block and head for E evicted keys.
    """
    x, size = inputs, columns.size
    no_key = working(x.key[:, :, :0])
    summary, queries = Summary.empty(count, no_key, working(x.value[:, :, :0])), RunningQueries.empty(no_key)
    scaled = working(x.query[:, :, : (columns.blocks - 1) * size].detach()).unflatten(1, (x.kv_heads, -1)) * x.scale
    summaries = [summary]
    for step, (key, value, real) in enumerate(_evicted(x, columns)):
        part = slice(step * size, (step + 1) * size)
        queries = queries.add(scaled[:, :, :, part], has_query[:, part])
        if key.shape[2]:
            summary = summary.absorb(key, value, real, queries.moments(), tilted=tilted)
        summaries.append(summary)
    rows, excess, sizes = zip(*((s.rows, s.excess, s.size) for s in summaries), strict=True)
    return torch.stack(rows, 2), torch.stack(excess, 2), torch.stack(sizes, 2)


def _evicted(inputs: Inputs, columns: Columns) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """For every block after the first, the keys (B, Hkv, E, D) that leave the lists, their values, and which of them
    are real (B, Hkv, E); the others are zero.
    """
    x = inputs
    lists = columns.index.masked_fill(~columns.used, x.keys).sort(-1).values
    before, now = lists[:, :, :-1].contiguous(), lists[:, :, 1:].contiguous()
    same = now.gather(-1, torch.searchsorted(now, before).clamp_max(now.shape[-1] - 1))
    gone = before.where(before != same, x.keys)
    counts = (gone < x.keys).sum(-1).amax((0, 1)).tolist()
    index = gone.topk(max(counts, default=0), largest=False).values
    for block, count in enumerate(counts):
        # Only as many as this block needs: shapes must not depend on later tokens.
        place = index[:, :, block, :count].unsqueeze(-1)
        real, place = place < x.keys, place.clamp_max(x.keys - 1)
        key, value = (working(rows.take_along_dim(place, 2)) * real for rows in (x.key, x.value))
        yield key, value, real.squeeze(-1)
