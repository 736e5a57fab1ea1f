"""A fixed number of stand-ins for all keys that a causal plan has evicted."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, cast

import torch
from torch import Tensor
from torch.nn.functional import pad

from fewkeys.core.graph import Columns, Graph
from fewkeys.core.inputs import Inputs
from fewkeys.core.precision import working
from fewkeys.core.weights import Softmax, Weights
from fewkeys.core.work import Work
from fewkeys.rest.base import BlockStandIns, CountedRest
from fewkeys.select.base import Recent, Selector
from fewkeys.sketch.summary import Summary, moments


@dataclass(frozen=True)
class RunningMeans(CountedRest):
    """`count` stand-ins for all keys of the past that are not kept; strictly causal, and of fixed size in a stream.

    Beside `RecentBlocks`, with or without `Sinks`. When a block of queries begins, a summary of `count` means absorbs
    the keys that no list holds any more, and merges the means whose merging costs least in the metric of earlier
    queries (equations: `fewkeys.sketch.summary`). Sequences may come whole, in pieces (`fewkeys.stream`) or token by
    token.

    Memory for a whole sequence is count / block times that of the keys and values. Slots: count. Cost
    O(n (count + block)^2 / block (D + Dv)). Gradients flow through the means, not through clusters and weights.
    """

    causal: ClassVar[bool] = True
    needs_causal: ClassVar[bool] = True

    def work(self, inputs: Inputs, keep: Selector) -> Work:
        block = _recent(keep)[0].size
        pairs = (self.count + block) ** 2 / block
        return Work(float(self.count), 2.0 * pairs * (inputs.head_dim + inputs.value_dim))

    @property
    def running(self) -> int:
        return self.count

    def check_beside(self, keep: Selector) -> None:
        remembered = [part.remembered for part in keep.parts]
        if len(_recent(keep)) != 1 or any(part is None or part.latest for part in remembered):
            raise ValueError(
                "keep: RunningMeans takes up whole blocks of keys as they leave RecentBlocks; expected one "
                f"RecentBlocks and, beside it, Sinks, got {keep}"
            )

    def prepare(self, inputs: Inputs, graph: Graph, weights: Weights) -> BlockStandIns:
        x, columns = inputs, cast("Columns", graph.columns)
        real = (torch.arange(x.queries, device=x.query.device) >= x.placeholders).expand(x.batch, -1)
        if x.valid_queries is not None:
            real = real & x.valid_queries
        tilted, size = isinstance(weights, Softmax), columns.size
        summary = Summary.empty(self.count, working(torch.cat([x.key[:, :, :0], x.value[:, :, :0]], -1)))
        scaled = working(x.query[:, :, : (columns.blocks - 1) * size].detach()).unflatten(1, (x.kv_heads, -1)) * x.scale
        squares = scaled.new_zeros((x.batch, x.kv_heads, x.head_dim + 1, x.head_dim + 1))
        summaries = [summary]  # of each block of queries: that of the block before, with the keys that left its lists
        for step, (rows, is_real) in enumerate(_evicted(x, columns)):
            part = slice(step * size, (step + 1) * size)
            queries = pad(scaled[:, :, :, part], (0, 1), value=1.0) * real[:, None, None, part, None]
            queries = queries.flatten(2, 3)
            squares = squares + queries.mT @ queries
            if rows.shape[2]:
                summary = summary.absorb(rows, is_real, moments(squares), tilted=tilted)
            summaries.append(summary)
        rows, excess, sizes = (
            torch.stack(part, 2) for part in zip(*((s.rows, s.excess, s.size) for s in summaries), strict=True)
        )
        key, value = rows.split([x.head_dim, x.value_dim], -1)
        return BlockStandIns(key, value, excess, sizes)


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


def _recent(keep: Selector) -> list[Recent]:
    remembered = (part.remembered for part in keep.parts)
    return [part.recent for part in remembered if part is not None and part.recent is not None]
