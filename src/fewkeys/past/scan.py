"""The summaries of a whole sequence, block by block."""

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn.functional import pad

from fewkeys.core.graph import Columns
from fewkeys.core.inputs import Inputs
from fewkeys.core.precision import working
from fewkeys.past.summary import Summary, moments


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
    summary = Summary.empty(count, working(torch.cat([x.key[:, :, :0], x.value[:, :, :0]], -1)))
    scaled = working(x.query[:, :, : (columns.blocks - 1) * size].detach()).unflatten(1, (x.kv_heads, -1)) * x.scale
    squares = scaled.new_zeros((x.batch, x.kv_heads, x.head_dim + 1, x.head_dim + 1))
    summaries = [summary]
    for step, (rows, real) in enumerate(_evicted(x, columns)):
        part = slice(step * size, (step + 1) * size)
        queries = pad(scaled[:, :, :, part], (0, 1), value=1.0) * has_query[:, None, None, part, None]
        queries = queries.flatten(2, 3)
        squares = squares + queries.mT @ queries
        if rows.shape[2]:
            summary = summary.absorb(rows, real, moments(squares), tilted=tilted)
        summaries.append(summary)
    parts = zip(*((s.rows, s.excess, s.size) for s in summaries), strict=True)
    rows, excess, sizes = (torch.stack(part, 2) for part in parts)
    return rows, excess, sizes


def _evicted(inputs: Inputs, columns: Columns) -> Iterator[tuple[Tensor, Tensor]]:
    """For every block after the first, the keys and values (B, Hkv, E, D + Dv) that leave the lists, and which of them
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
        rows = torch.cat([part.take_along_dim(place, 2) for part in (x.key, x.value)], -1)
        yield working(rows) * real, real.squeeze(-1)
