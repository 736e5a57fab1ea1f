"""Graphs beside the predicted ones: the gold graph, global tokens, and random edges."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from fewkeys.core.entmax import check_alpha, entmax
from fewkeys.core.graph import Graph, query_blocks, visible
from fewkeys.core.inputs import Inputs
from fewkeys.core.rows import marked_places
from fewkeys.core.work import Work
from fewkeys.papers.sparsefinder.groups import Groups
from fewkeys.select.base import CountedSelector, Selector
from fewkeys.select.controls import generator_of, uniform
from fewkeys.select.top_k import score_blocks
from fewkeys.select.window import Sinks


@dataclass(frozen=True)
class EntmaxSupport(Selector):
    """(i, j) is an edge when `entmax_alpha(s_i)_j > 0`, s_i the scores of query i with all keys that it sees.

    Attention by `Entmax(alpha)` over this graph, or any that contains it, equals that over all keys. A larger alpha > 1
    has fewer edges. Cost O(n^2 D), memory O(n + edges).

    Source: the gold graph of Sparsefinder (arXiv 2109.12188), section 3.1.
    """

    alpha: float = 1.5
    is_oracle: ClassVar[bool] = True
    causal = True

    def __post_init__(self) -> None:
        check_alpha(self.alpha, "EntmaxSupport alpha")

    def select(self, inputs: Inputs) -> Graph:
        return listed(inputs, (entmax(scores, self.alpha) > 0 for _, scores in score_blocks(inputs)))

    def covers(self, inputs: Inputs) -> bool:
        return False

    def work(self, inputs: Inputs) -> Work:
        return Work(float(inputs.keys), 2.0 * inputs.head_dim * inputs.queries * inputs.gqa_ratio)


@dataclass(frozen=True)
class GlobalTokens(CountedSelector):
    """(i, j) is an edge when i or j is among the first `count` real tokens.

    In cross-attention, and for queries after a cache, the position of query i decides. Under causality the first tokens
    see their past only. Cost O(n count).

    Source: Longformer (arXiv 2004.05150), section 3.1; BigBird (arXiv 2007.14062), section 2.
    """

    causal = True

    def select(self, inputs: Inputs) -> Graph:
        x, graph = inputs, Sinks(self.count).select(inputs)
        if x.offset >= self.count:
            return graph
        first = (torch.arange(x.queries, device=x.query.device) + x.offset < self.count).expand(x.batch, -1)
        if x.valid_queries is not None:
            first = x.valid_queries & (x.valid_queries.cumsum(-1) <= self.count)
        query = torch.where(first, 0, -1)[:, None, :, None].expand(-1, x.query_heads, -1, -1)
        return graph | Graph(x, extra=Groups(query, query.new_zeros((*query.shape[:2], x.keys, 1)), 1))

    def work(self, inputs: Inputs) -> Work:
        # As many rows as columns, spread over all queries.
        return Work(self.count * (1.0 + inputs.keys / inputs.queries))


@dataclass(frozen=True)
class RandomEdges(CountedSelector):
    """Every query keeps `count` of the keys that it may see, drawn by the call's generator without replacement: the
    control for edges. Query heads that share their keys share the draw. Cost O(n^2).
    """

    is_oracle: ClassVar[bool] = True
    causal = True

    def select(self, inputs: Inputs) -> Graph:
        x, generator = inputs, generator_of(inputs)

        def mask(start: int, stop: int) -> Tensor:
            seen = visible(x, start, stop)
            number = uniform(x, (x.batch, x.kv_heads, stop - start, x.keys), generator).masked_fill(~seen, -1.0)
            top = number.topk(min(self.count, x.keys), -1).indices
            drawn = torch.zeros_like(number, dtype=torch.bool).scatter_(-1, top, True) & seen
            return drawn.repeat_interleave(x.gqa_ratio, 1)

        return listed(x, (mask(start, stop) for start, stop in query_blocks(x)))

    def work(self, inputs: Inputs) -> Work:
        return Work(float(self.count), float(inputs.queries))


def listed(inputs: Inputs, masks: Iterable[Tensor]) -> Graph:
    """The graph of masks (B, Hq, m, Nk) of consecutive blocks of queries."""
    lists = []
    for mask in masks:
        place = marked_places(mask)
        lists.append(place.masked_fill(~mask.gather(-1, place), -1))
    longest = max(part.shape[-1] for part in lists)
    return Graph(inputs, rows=torch.cat([pad(part, (0, longest - part.shape[-1]), value=-1) for part in lists], 2))
