"""Means of the nodes that a query meets in a tree and does not open."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fewkeys.core.graph import Graph
from fewkeys.core.inputs import Inputs
from fewkeys.core.weights import Softmax, Weights
from fewkeys.core.work import Work, per_score
from fewkeys.native.tensors import unwatched
from fewkeys.rest.base import NodeStandIns, Rest
from fewkeys.select.base import Selector
from fewkeys.tree.descent import Descent
from fewkeys.tree.forest import summarise


@dataclass(frozen=True)
class TreeMeans(Rest):
    """Beside `KeyTree`: every node that a query scores and does not open stands in for its keys.

    Its key and value are the means of its keys and values, its logit `score + log n + min(0.3 spread, 3)`, where spread
    is the variance of the scores inside (`fewkeys.tree.descent`). `Softmax` only. Strictly causal with the selector.

    Slots: none of its own, since the selector counts every node scored. Cost O(nodes scored Dv) a query. Gradients flow
    through means and variances; trees, and what is opened, are choices and carry none.
    """

    causal: ClassVar[bool] = True

    def prepare(self, inputs: Inputs, graph: Graph, weights: Weights) -> NodeStandIns:
        if not isinstance(graph.descent, Descent):
            raise ValueError("rest: TreeMeans needs the graph of KeyTree, got one without a descent; use Drop()")
        walks = graph.descent.walks
        if unwatched(inputs.key, inputs.value):
            return NodeStandIns(tuple(walk.nodes for walk in walks))
        rows = [(walk.sequences.rows(inputs.key), walk.sequences.rows(inputs.value)) for walk in walks]
        return NodeStandIns(
            tuple(summarise(walk.forest, *own, inputs.impl) for walk, own in zip(walks, rows, strict=True))
        )

    def slots(self, head_dim: int, value_dim: int) -> float:
        return 0.0

    def work(self, inputs: Inputs, keep: Selector) -> Work:
        # About a third of a query's slots are nodes that stay closed: a weight and a product with the value each.
        slots = sum(held.tree for part in keep.parts if (held := part.remembered) is not None)
        ratio = (2 * inputs.value_dim + 20) / per_score(inputs)
        return Work(slots / 3 * ratio, 2.0 * (inputs.head_dim + inputs.value_dim))

    def check_beside(self, keep: Selector) -> None:
        if keep.remembered is None or not keep.remembered.tree:
            raise ValueError(f"keep: TreeMeans stands for the closed nodes of KeyTree(slots) alone, got {keep}")

    def check(self, weights: Weights) -> None:
        super().check(weights)
        if not isinstance(weights, Softmax):
            raise ValueError(f"rest: TreeMeans is defined for Softmax(), got {weights}; use rest=Drop()")
