"""Group means: the groups by which queries find their keys stand in for the keys they do not find."""

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
    """The keys of other groups by the means of their groups: no clusters but those that selected the keys.

    Beside a selector of groups (a query attends to the keys of its own groups exactly). A key belongs to its first
    group, one of `count`, or to a stand-in for the keys of no group. Keys, values and masses of the stand-ins are those
    of `ClusterMeans`; a query's own groups are kept, so their stand-ins speak for nobody. Where query heads share their
    keys, the first of them says which groups the shared keys belong to.

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
        if not group.shape[3]:  # where no key is real, none belongs anywhere
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
    known = key_statistics(inputs).importance
    if inputs.valid is not None:
        known = known.masked_fill(~inputs.valid[:, None], -torch.inf)
    top = known.amax(-1, keepdim=True)
    top = top.masked_fill(top == -torch.inf, 0.0)
    weight = (TILT * (known - top)).clamp_min(LOWEST_LOG_WEIGHT).exp().masked_fill(known == -torch.inf, 0.0)
    mass, along = known.new_zeros((2, *known.shape[:2], count)).unbind()
    mass = mass.scatter_add(-1, label, weight)
    along = along.scatter_add(-1, label, weight * known.masked_fill(known == -torch.inf, 0.0))
    return along / mass.clamp_min(torch.finfo(mass.dtype).tiny)
