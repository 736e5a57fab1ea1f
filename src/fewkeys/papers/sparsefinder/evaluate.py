"""Scores of selectors against the gold graph of entmax heads, beside controls."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import count
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from fewkeys.captures.capture import AttentionInputs, Capture
from fewkeys.core import metrics
from fewkeys.core.graph import visible
from fewkeys.core.inputs import Inputs
from fewkeys.papers.sparsefinder.groupings import Grouping
from fewkeys.papers.sparsefinder.groups import Groups
from fewkeys.papers.sparsefinder.patterns import EntmaxSupport, RandomEdges
from fewkeys.papers.sparsefinder.sparsefinder import Sparsefinder
from fewkeys.select import Selector, Window
from fewkeys.tuning.score import problem_of


@dataclass(frozen=True, eq=False)
class GraphScores:
    """The quality of a selector's edges in every head of a layer: means over the sequences, each (Hq,) float64.

    recall: share of gold edges that are kept. sparsity: share of *visible* pairs that are not kept. exact: share of
    queries all of whose gold edges are kept. slots: keys kept per query. computation, entropy: of `Groups`, else NaN.
    """

    recall: Tensor
    sparsity: Tensor
    exact: Tensor
    slots: Tensor
    computation: Tensor
    entropy: Tensor

    def means(self) -> dict[str, float]:
        """The means over the heads."""
        return {field.name: float(getattr(self, field.name).mean()) for field in fields(self)}


def score_graphs(
    capture: Capture, layer: int, selectors: Mapping[str, Selector], *, alpha: float = 1.5, seed: int = 0
) -> dict[str, GraphScores]:
    """Compare the edges of each selector with `EntmaxSupport(alpha)` in one layer of a capture.

    Each sequence runs alone, without its padding. `seed`: for random selectors. Cost O(n^2 D), memory O(n^2).
    """
    total: dict[str, list[Tensor]] = {name: [] for name in selectors}
    for call in capture.calls(layer):
        for sequence in _sequences(call):
            gold = EntmaxSupport(alpha).select(problem_of(sequence)).to_mask()
            for name, selector in selectors.items():
                total[name].append(_scores(problem_of(sequence, seed), selector, gold))
    return {name: GraphScores(*torch.stack(scores).mean(0).unbind(0)) for name, scores in total.items()}


def judge(
    finders: Mapping[str, Sparsefinder],
    capture: Capture,
    groupings: Sequence[Grouping],
    *,
    keep: Selector,
    done: Callable[[int, int], None],
) -> list[dict[str, Any]]:
    """A row for every grouping in the space of every finder, united with `keep`; calls `done(steps, of)`.

    Rows have `name` and `space`, the means of `GraphScores` over layers, heads and sequences, None in place of NaN, and
    the recall of a `window` and of `random` edges that keep as many keys per query.
    """
    alpha, steps = next(iter(finders.values())).settings.alpha, count(1)

    def over_layers(selectors: Callable[[int], Mapping[str, Selector]]) -> dict[str, dict[str, float]]:
        layers = []
        for layer in range(capture.layers):
            scores = score_graphs(capture, layer, selectors(layer), alpha=alpha)
            layers.append({name: graph.means() for name, graph in scores.items()})
            done(next(steps), 2 * capture.layers)
        return {
            name: {measure: fmean(scores[name][measure] for scores in layers) for measure in measures}
            for name, measures in layers[0].items()
        }

    rules = {f"{space}/{grouping.rule}": (space, grouping) for space in finders for grouping in groupings}
    predicted = over_layers(
        lambda layer: {name: finders[space].selector(layer, rule) | keep for name, (space, rule) in rules.items()}
    )
    counts = {name: max(1, round(means["slots"])) for name, means in predicted.items()}
    controls = {f"{kind.__name__}/{n}": kind(n) for n in set(counts.values()) for kind in (Window, RandomEdges)}
    chance = over_layers(lambda _: controls)
    rows: list[dict[str, Any]] = []
    for name, (space, rule) in rules.items():
        means = {measure: None if math.isnan(value) else value for measure, value in predicted[name].items()}
        window, random = (chance[f"{kind}/{counts[name]}"]["recall"] for kind in ("Window", "RandomEdges"))
        rows.append({"name": rule.rule, "space": space, **means, "window": window, "random": random})
    return rows


def _sequences(call: AttentionInputs) -> Iterator[AttentionInputs]:
    """Every sequence of a call alone, without padding."""
    for row in range(len(call.query)):
        sequence = call.rows(slice(row, row + 1))
        masks = sequence.real_queries, sequence.key_mask
        queries, keys = (slice(None) if mask is None else mask[0] for mask in masks)
        query, key, value = sequence.query[:, :, queries], sequence.key[:, :, keys], sequence.value[:, :, keys]
        past = sequence.query_offset
        if sequence.key_mask is not None:
            past = int(sequence.key_mask[0, :past].sum())
        alone = replace(sequence, query=query, key=key, value=value, query_offset=past, gradient=None)
        if query.shape[2] and key.shape[2]:
            yield replace(alone, key_mask=None, query_mask=None)


def _scores(x: Inputs, selector: Selector, gold: Tensor) -> Tensor:
    """The fields of `GraphScores` (6, Hq) of one sequence."""
    graph = selector.select(x)
    mask = graph.to_mask()
    seen = visible(x, 0, x.queries).expand_as(mask)
    kept = mask.sum((-2, -1)).double()
    computation = entropy = torch.full_like(kept, math.nan)
    if isinstance(graph.extra, Groups):
        computation, entropy = graph.extra.computation_sparsity(), graph.extra.entropy()
    recall, exact = metrics.recall(mask, gold), metrics.exact_fraction(mask, gold)
    measures = (recall, 1 - kept / seen.sum((-2, -1)), exact, kept / x.queries, computation, entropy)
    return torch.stack([value[0].double() for value in measures])
