"""Means of the past: a fixed number of stand-ins for every key that a causal plan has evicted."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fewkeys.core.graph import Columns, Graph
from fewkeys.core.inputs import Inputs
from fewkeys.core.validation import check_count
from fewkeys.core.weights import Softmax, Weights
from fewkeys.core.work import Work
from fewkeys.past.scan import scan
from fewkeys.rest.base import BlockStandIns, Rest
from fewkeys.select.base import Recent, Selector


@dataclass(frozen=True)
class RunningMeans(Rest):
    """`count` stand-ins for all keys of the past that are not kept; strictly causal, and of fixed size in a stream.

    Beside `RecentBlocks`, and as many `Sinks` and causal rules (`Leverage`, `KeyNorm`, `RandomKeys`) as wanted: when
    a block of queries begins, the keys that no list holds any more are absorbed by a summary of `count` means, in
    which the cheapest are merged (`fewkeys.past.summary` has the equations). The metric knows the queries up to the
    block's beginning. What is absorbed never comes back and nothing later changes it, so a block's stand-ins are the
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

    def work(self, inputs: Inputs, keep: Selector) -> Work:
        block = _recent(keep)[0].size
        pairs = (self.count + block) ** 2 / block
        return Work(float(self.count), 2.0 * pairs * (inputs.head_dim + inputs.value_dim))

    @property
    def running(self) -> int:
        return self.count

    def check_beside(self, keep: Selector) -> None:
        recent, facts = _recent(keep), [part.remembered for part in keep.parts]
        if len(recent) != 1 or not all(fact is not None and not fact.latest for fact in facts):
            raise ValueError(
                "keep: RunningMeans takes up whole blocks of keys as they leave RecentBlocks; expected one "
                f"RecentBlocks and, beside it, Sinks, got {keep}"
            )

    def prepare(self, inputs: Inputs, graph: Graph, weights: Weights) -> BlockStandIns:
        has_query, tilted = _real_queries(inputs), isinstance(weights, Softmax)
        states = scan(self.count, inputs, blocks_of(graph), has_query, tilted=tilted)
        return BlockStandIns(states, inputs.head_dim)


def _recent(keep: Selector) -> list[Recent]:
    return [fact.recent for part in keep.parts if (fact := part.remembered) is not None and fact.recent is not None]


def blocks_of(graph: Graph) -> Columns:
    """The lists of a graph whose edges are all lists by blocks, as stand-ins of the past require."""
    if graph.columns is None or graph.band is not None or graph.rows is not None or graph.full:
        raise ValueError(
            "keep: RunningMeans absorbs whole blocks of keys: expected RecentBlocks (and Sinks beside it), got a "
            "window or a rule with a list for every query"
        )
    return graph.columns


def _real_queries(inputs: Inputs) -> Tensor | None:
    """(B, Nq): queries that count in the statistics; None: all."""
    real = inputs.valid_queries
    if inputs.placeholders:
        later = torch.arange(inputs.queries, device=inputs.query.device) >= inputs.placeholders
        real = later.expand(inputs.batch, -1) if real is None else real & later
    return real
