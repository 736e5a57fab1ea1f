"""The first tokens of the sequence, which see everything and are seen by everything."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fewkeys.core.graph import Graph
from fewkeys.core.inputs import Inputs
from fewkeys.core.work import Work
from fewkeys.papers.sparsefinder.groups import Groups
from fewkeys.select.base import Counted
from fewkeys.select.window import Sinks


@dataclass(frozen=True)
class GlobalTokens(Counted):
    """(i, j) is an edge when i or j is among the first `count` real tokens.

    `Sinks` has only the edges with such a j. In cross-attention, and for queries after a cache, query i counts as one
    of the first tokens if its position is below `count`. Under causality the first tokens see their past only.
    Cost O(n count).

    Source: Longformer (arXiv 2004.05150), section 3.1; BigBird (arXiv 2007.14062), section 2.
    """

    causal = True

    def select(self, inputs: Inputs) -> Graph:
        x, graph = inputs, Sinks(self.count).select(inputs)
        if x.offset >= self.count:
            return graph
        shape = (x.batch, x.query_heads, -1, -1)
        query = torch.where(self._first(x), 0, -1)[:, None, :, None].expand(shape)
        key = torch.zeros((1, 1, x.keys, 1), dtype=torch.int64, device=x.key.device).expand(shape)
        return graph | Graph(x, extra=Groups(query, key, 1))

    def _first(self, x: Inputs) -> Tensor:
        """Which queries are among the first tokens, (B, Nq)."""
        if x.valid_queries is not None:
            return x.valid_queries & (x.valid_queries.cumsum(-1) <= self.count)
        place = torch.arange(x.queries, device=x.query.device) + x.offset
        return (place < self.count).expand(x.batch, -1)

    def work(self, inputs: Inputs) -> Work:
        # As many rows as columns, spread over all queries.
        return Work(self.count * (1.0 + inputs.keys / inputs.queries))
