"""Oracles: bounds of what selection can reach."""

from abc import ABC
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fewkeys.core.graph import Graph, query_blocks, visible
from fewkeys.core.inputs import Inputs
from fewkeys.core.precision import working, working_dtype
from fewkeys.core.work import Work
from fewkeys.select.base import CountedSelector, shared_top


@dataclass(frozen=True)
class _Oracle(CountedSelector, ABC):
    is_oracle: ClassVar[bool] = True

    def work(self, inputs: Inputs) -> Work:
        return Work(float(self.count), 2.0 * inputs.head_dim * inputs.queries * inputs.gqa_ratio)


@dataclass(frozen=True)
class TopK(_Oracle):
    """Each query's own `count` keys of largest score: the best choice that ignores the values. Cost O(n^2)."""

    causal = True

    def select(self, inputs: Inputs) -> Graph:
        rows = []
        for _, scores in score_blocks(inputs):
            top = scores.topk(min(self.count, inputs.keys), -1)
            rows.append(top.indices.masked_fill(top.values == -torch.inf, -1).sort(-1).values)
        return Graph(inputs, rows=torch.cat(rows, 2))


@dataclass(frozen=True)
class BestColumns(_Oracle):
    """The `count` keys, shared by all queries of a head, that hold the most softmax mass. Cost O(n^2). Not causal."""

    def select(self, inputs: Inputs) -> Graph:
        x = inputs
        mass = x.key.new_zeros((x.batch, x.kv_heads, x.keys), dtype=working_dtype(x.key.dtype))
        for start, scores in score_blocks(x):
            weights = scores.softmax(-1).nan_to_num(0.0)
            if x.valid_queries is not None:
                weights = weights * x.valid_queries[:, None, start : start + weights.shape[2], None]
            mass += weights.sum(-2).unflatten(1, (x.kv_heads, x.gqa_ratio)).sum(2)
        return shared_top(x, mass, self.count)


def score_blocks(inputs: Inputs) -> Iterator[tuple[int, Tensor]]:
    """(first query, scores (B, Hq, m, Nk)) of blocks of queries, hidden keys at -inf, without gradient."""
    x = inputs
    key = working(x.key.detach()).repeat_interleave(x.gqa_ratio, 1)
    for start, stop in query_blocks(x):
        query = working(x.query[:, :, start:stop].detach()) * x.scale
        scores = query @ key.mT
        if x.bias is not None:
            scores = scores + x.bias.of(start + x.offset, stop + x.offset, x.keys).detach()
        yield start, scores.masked_fill(~visible(x, start, stop), -torch.inf)
