"""Means of the past: a fixed number of stand-ins for every key that a causal plan has let go."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fewkeys.graph import Columns, Graph
from fewkeys.inputs import Inputs
from fewkeys.rest.base import BlockStandIns, Rest
from fewkeys.sketch.gram import working
from fewkeys.sketch.running import RunningQueries
from fewkeys.sketch.summary import Summary
from fewkeys.validation import check_count
from fewkeys.weights import Softmax, Weights


@dataclass(frozen=True)
class RunningMeans(Rest):
    """`count` stand-ins for all keys of the past that are not kept; strictly causal, and what a stream can remember.

    Beside `RecentBlocks`, and as many `Sinks` and causal rules (`Leverage`, `KeyNorm`, `RandomKeys`) as wanted: when
    a block of queries begins, the keys that no list holds any more are taken up into a summary of `count` means, in
    which the cheapest are merged (`fewkeys.sketch.summary` has the equations). The metric knows the queries up to the
    block's beginning. What is taken up never comes back and nothing later changes it, so a block's stand-ins are the
    same whether a sequence is given whole, in pieces (`fewkeys.stream`) or token by token.

    The number of stand-ins is fixed whatever the length; memory for a whole sequence is count / block times that of
    the keys and values. Slots: count. Cost O(n (count + block)^2 / block (D + Dv)). Gradients flow through the means;
    clusters and weights are choices and carry none.
    """

    count: int
    causal: ClassVar[bool] = True
    needs_causal: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_count("RunningMeans count", self.count)

    def slots(self, head_dim: int, value_dim: int) -> float:
        return float(self.count)

    def prepare(self, inputs: Inputs, graph: Graph, weights: Weights) -> BlockStandIns:
        x, columns = inputs, blocks_of(graph)
        key, value, tilted = working(x.key), working(x.value), isinstance(weights, Softmax)
        query, real_queries = working(x.grouped_query().detach()) * x.scale, _real_queries(x)
        index, leaving = departures(x, columns)
        widths = leaving.sum(-1).amax((0, 1)).tolist()
        summary, queries = Summary.empty(self.count, key, value), RunningQueries.empty(key)
        found: list[Summary] = []
        for block in range(columns.blocks):
            if block:
                part = slice((block - 1) * columns.size, block * columns.size)
                queries = queries.add(query[:, :, :, part], None if real_queries is None else real_queries[:, part])
                # As many columns as this block needs: no shape may depend on what comes later.
                real = leaving[:, :, block, : widths[block]]
                if widths[block]:
                    rows = [_rows(tensor, index[:, :, block, : widths[block]], real) for tensor in (key, value)]
                    summary = summary.absorb(rows[0], rows[1], real, queries.moments(), tilted=tilted)
            found.append(summary)
        return by_block(found)


def by_block(summaries: Sequence[Summary]) -> BlockStandIns:
    """The stand-ins of consecutive blocks, one summary for each."""
    rows, dim = torch.stack([one.rows for one in summaries], 2), summaries[0].seen.key.shape[-1]
    return BlockStandIns(
        rows[..., :dim],
        rows[..., dim:],
        torch.stack([one.excess for one in summaries], 2),
        torch.stack([one.size for one in summaries], 2),
    )


def blocks_of(graph: Graph) -> Columns:
    """The lists of a graph whose edges are all lists by blocks, which is what stand-ins of the past need."""
    if graph.columns is None or graph.band is not None or graph.rows is not None or graph.full:
        raise ValueError(
            "keep: RunningMeans takes up whole blocks of keys: expected RecentBlocks (and Sinks, Leverage, KeyNorm or "
            "RandomKeys beside it), got a window or a rule with a list for every query"
        )
    return graph.columns


def departures(inputs: Inputs, columns: Columns) -> tuple[Tensor, Tensor]:
    """Which keys leave the lists as a block begins: positions (B, Hkv, blocks, E) and which of them are real.

    A key leaves at the first block after its own on whose list it is not.
    """
    x, device = inputs, columns.index.device
    heads = (x.batch, x.kv_heads)
    own = torch.arange(x.keys, device=device) // columns.size
    number = torch.arange(columns.blocks, device=device)[:, None].expand_as(columns.index)
    last = own.expand(*heads, -1).scatter_reduce(
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
    return index.unflatten(-1, (columns.blocks, -1)), place < count.unsqueeze(-1)


def _rows(rows: Tensor, index: Tensor, real: Tensor) -> Tensor:
    """Rows (B, H, N, D) at index (B, H, E), zero where they are not real."""
    found = rows.gather(2, index.unsqueeze(-1).expand(-1, -1, -1, rows.shape[-1]))
    return found * real.unsqueeze(-1)


def _real_queries(inputs: Inputs) -> Tensor | None:
    """(B, Nq): queries that count in the statistics; None: all."""
    real = inputs.valid_queries
    if inputs.filler:
        later = torch.arange(inputs.queries, device=inputs.query.device) >= inputs.filler
        real = later.expand(inputs.batch, -1) if real is None else real & later
    return real
