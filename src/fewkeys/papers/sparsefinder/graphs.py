"""Scores of selectors against the gold graph of entmax heads, on captured sequences."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fewkeys.captures.capture import AttentionInputs, Capture
from fewkeys.core import metrics
from fewkeys.core.graph import visible
from fewkeys.core.inputs import Inputs
from fewkeys.papers.sparsefinder.entmax_support import EntmaxSupport
from fewkeys.papers.sparsefinder.group_measures import computation_sparsity, group_entropy
from fewkeys.papers.sparsefinder.groups import Groups
from fewkeys.select.base import Selector
from fewkeys.tuning.score import problem_of


@dataclass(frozen=True, eq=False)
class GraphScores:
    """The quality of a selector's edges in every head of a layer: means over the sequences, each (Hq,) float64.

    recall: share of the gold edges that are kept. sparsity: share of the *visible* pairs that are not kept. exact:
    share of the queries all of whose gold edges are kept. slots: keys kept per query. computation and entropy: of its
    groups (`computation_sparsity`, `group_entropy` of the keys), NaN for a graph without groups.
    """

    recall: Tensor
    sparsity: Tensor
    exact: Tensor
    slots: Tensor
    computation: Tensor
    entropy: Tensor

    def means(self) -> dict[str, float | None]:
        """The means over the heads, None for NaN."""
        means = {name: float(getattr(self, name).mean()) for name in self.__dataclass_fields__}
        return {name: None if math.isnan(value) else value for name, value in means.items()}


def score_graphs(
    capture: Capture, layer: int, selectors: Mapping[str, Selector], *, alpha: float = 1.5, seed: int = 0
) -> dict[str, GraphScores]:
    """Compare the edges of each selector with `EntmaxSupport(alpha)` in one layer of a capture.

    Each sequence runs alone and without its padding. `seed`: for random selectors. Cost O(n^2 D), memory O(n^2) of
    one sequence.
    """
    total: dict[str, list[Tensor]] = {name: [] for name in selectors}
    for call in capture.calls(layer):
        for sequence in _sequences(call):
            gold = EntmaxSupport(alpha).select(problem_of(sequence)).to_mask()
            for name, selector in selectors.items():
                total[name].append(_scores(problem_of(sequence, seed), selector, gold))
    return {name: GraphScores(*torch.stack(scores).mean(0).unbind(0)) for name, scores in total.items()}


def _sequences(call: AttentionInputs) -> Iterator[AttentionInputs]:
    """Every sequence of a call alone, its real tokens only."""
    for row in range(len(call.query)):
        sequence = call.rows(slice(row, row + 1))
        x = problem_of(sequence)
        queries = x.valid_queries if sequence.query_mask is None else sequence.query_mask
        query = sequence.query if queries is None else sequence.query[:, :, queries[0]]
        keys = slice(None) if x.valid is None else x.valid[0]
        key, value = sequence.key[:, :, keys], sequence.value[:, :, keys]
        if query.shape[2] and key.shape[2]:
            yield replace(sequence, query=query, key=key, value=value, key_mask=None, query_mask=None, gradient=None)


def _scores(x: Inputs, selector: Selector, gold: Tensor) -> Tensor:
    graph = selector.select(x)
    mask = graph.to_mask()
    seen = visible(x, 0, x.queries).expand_as(mask)
    kept = mask.sum((-2, -1)).double()
    none = torch.full_like(kept, math.nan)
    groups = graph.extra if isinstance(graph.extra, Groups) else None
    measures = (
        metrics.recall(mask, gold),
        1 - kept / seen.sum((-2, -1)),
        metrics.exact_fraction(mask, gold),
        kept / x.queries,
        none if groups is None else computation_sparsity(groups),
        none if groups is None else group_entropy(groups.key, groups.count),
    )
    return torch.stack([value[0].double() for value in measures])
