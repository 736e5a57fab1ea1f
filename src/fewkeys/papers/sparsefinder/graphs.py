"""How well selectors find the gold graph of entmax heads, on captured sequences."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

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
    """How good a selector's edges are in every head of a layer: means over the sequences, each (Hq,) float64.

    recall: share of the gold edges that are kept. sparsity: share of the pairs *that are visible* that are not. exact:
    share of the queries all of whose gold edges are kept. slots: keys kept per query. computation and entropy: those
    of its groups (`computation_sparsity`, `group_entropy` of the keys), NaN for a graph without.
    """

    recall: Tensor
    sparsity: Tensor
    exact: Tensor
    slots: Tensor
    computation: Tensor
    entropy: Tensor

    def means(self) -> dict[str, float | None]:
        """The means over the heads, None for what does not exist."""
        found = {name: float(getattr(self, name).mean()) for name in self.__dataclass_fields__}
        return {name: None if math.isnan(value) else value for name, value in found.items()}


def score_graphs(
    capture: Capture, layer: int, selectors: Mapping[str, Selector], *, alpha: float = 1.5, seed: int = 0
) -> dict[str, GraphScores]:
    """Compare the edges of each selector with `EntmaxSupport(alpha)` in one layer of a capture.

    Sequence by sequence, without its padding, so that no filler counts. `seed`: of selectors that draw. Cost O(n^2 D)
    and memory O(n^2) of one sequence.
    """
    total: dict[str, list[Tensor]] = {name: [] for name in selectors}
    for call in capture.calls(layer):
        for sequence in _sequences(call):
            gold = EntmaxSupport(alpha).select(problem_of(sequence)).to_mask()
            for name, selector in selectors.items():
                total[name].append(_scores(problem_of(sequence, seed), selector, gold))
    return {name: GraphScores(*torch.stack(found).mean(0).unbind(0)) for name, found in total.items()}


def _sequences(call: AttentionInputs) -> Iterator[AttentionInputs]:
    """Every sequence of a call alone, its real tokens only."""
    for row in range(len(call.query)):
        one = call.rows(slice(row, row + 1))
        x = problem_of(one)
        queries = x.valid_queries if one.query_mask is None else one.query_mask
        query = one.query if queries is None else one.query[:, :, queries[0]]
        keys = slice(None) if x.valid is None else x.valid[0]
        if query.shape[2] and one.key[:, :, keys].shape[2]:
            given = query, one.key[:, :, keys], one.value[:, :, keys], one.scale, one.is_causal, None, one.query_offset
            yield AttentionInputs(*given, distance_bias=one.distance_bias)


def _scores(x: Inputs, selector: Selector, gold: Tensor) -> Tensor:
    graph = selector.select(x)
    mask = graph.to_mask()
    seen = visible(x, 0, x.queries).expand_as(mask)
    kept = mask.sum((-2, -1)).double()
    none = torch.full_like(kept, math.nan)
    groups = graph.extra if isinstance(graph.extra, Groups) else None
    found = (
        metrics.recall(mask, gold),
        1 - kept / seen.sum((-2, -1)),
        metrics.exact_fraction(mask, gold),
        kept / x.queries,
        none if groups is None else computation_sparsity(groups),
        none if groups is None else group_entropy(groups.key, groups.count),
    )
    return torch.stack([value[0].double() for value in found])
