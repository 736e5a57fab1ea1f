"""Group means: the mean of each group that a query does not attend to exactly stands in for its keys."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fewkeys.core.graph import Graph
from fewkeys.core.inputs import Inputs
from fewkeys.core.validation import check_count
from fewkeys.core.weights import Softmax, Weights
from fewkeys.core.work import Work
from fewkeys.papers.sparsefinder.groups import Groups
from fewkeys.rest.base import Rest, StandIns
from fewkeys.rest.cluster_means import represent
from fewkeys.select.base import Selector
from fewkeys.sketch.clusters import LOWEST_LOG_WEIGHT, TILT, key_statistics


@dataclass(frozen=True)
class GroupMeans(Rest):
    """Stand-ins for the groups of a grouping selector: the selector's groups serve as clusters.

    A query attends to the keys of its groups exactly, and to the other groups through their stand-ins. A key belongs to
    its first group, one of `count`; keys without a group share one more stand-in. Keys, values and masses of the
    stand-ins are those of `ClusterMeans`. If query heads share their keys, the groups are those of the first of them.

    Slots: count + 1. Cost O(n (D + Dv) + edges) beyond the attention. Gradients as `ClusterMeans`. Not causal.
    """

    count: int

    def __post_init__(self) -> None:
        check_count("GroupMeans count", self.count)

    def slots(self, head_dim: int, value_dim: int) -> float:
        return self.count + 1.0

    def work(self, inputs: Inputs, keep: Selector) -> Work:
        return Work(self.count + 1.0, 2.0 * (inputs.head_dim + inputs.value_dim))

    def prepare(self, inputs: Inputs, graph: Graph, weights: Weights) -> StandIns:
        if not isinstance(graph.extra, Groups):
            raise ValueError("rest: GroupMeans needs a selector that keeps groups, got none; use ClusterMeans(count)")
        group = graph.extra.key[:, :: inputs.gqa_ratio, :, :1]
        if not group.shape[3]:  # no key has a group
            group = group.new_full((*group.shape[:3], 1), -1)
        group = group.squeeze(3)
        most = int(group.max())
        if most >= self.count:
            raise ValueError(f"GroupMeans count: expected at least {most + 1} groups, got {self.count}; raise it")
        label = group.masked_fill(group < 0, self.count)
        importance = _importance(inputs, label, self.count + 1) if isinstance(weights, Softmax) else None
        return represent(inputs, graph, weights, label, self.count + 1, importance)


def _importance(inputs: Inputs, label: Tensor, count: int) -> Tensor:
    """The mean importance of every group's keys (B, Hkv, C), weighted as in Lloyd's steps."""
    importance = key_statistics(inputs).importance
    if inputs.valid is not None:
        importance = importance.masked_fill(~inputs.valid[:, None], -torch.inf)
    top = importance.amax(-1, keepdim=True)
    top = top.masked_fill(top == -torch.inf, 0.0)
    weight = (TILT * (importance - top)).clamp_min(LOWEST_LOG_WEIGHT).exp().masked_fill(importance == -torch.inf, 0.0)
    mass, along = importance.new_zeros((2, *importance.shape[:2], count)).unbind()
    mass = mass.scatter_add(-1, label, weight)
    along = along.scatter_add(-1, label, weight * importance.masked_fill(importance == -torch.inf, 0.0))
    return along / mass.clamp_min(torch.finfo(mass.dtype).tiny)
