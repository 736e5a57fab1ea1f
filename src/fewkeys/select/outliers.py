"""Keys that matter and that the mean of their cluster describes worst."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fewkeys.core.graph import Graph
from fewkeys.core.inputs import Inputs
from fewkeys.core.validation import check_count
from fewkeys.core.work import Work
from fewkeys.select.base import Counted, Selector, Sharded, shared_top
from fewkeys.select.controls import KeyNorm
from fewkeys.select.leverage import Leverage
from fewkeys.sketch.clusters import clustering_operations, clusters, key_statistics


@dataclass(frozen=True)
class Outliers(Counted):
    """The `count` keys of largest `g_j / 2 + log |x_j - centre of its cluster|`, shared by all queries of a head.

    `g_j = log E_q exp(q . k_j)` is the key's importance and x_j its features (score spread and value, see
    `fewkeys.sketch.clusters`). Made to stand beside `rest=ClusterMeans(clusters)`: both read the same clusters, and
    what is kept here is what the cluster's stand-in would get most wrong. Cost O(n clusters (D + Dv)). Not causal.
    """

    clusters: int

    def __post_init__(self) -> None:
        super().__post_init__()
        check_count("Outliers clusters", self.clusters)

    @property
    def causal(self) -> bool:
        return False

    def scores(self, inputs: Inputs) -> Tensor:
        """(B, Hkv, Nk): twice the expression above.

        The two keys of a cluster of two have the very same score; the thousandth lets the more important one win,
        whatever the rounding.
        """
        distance = clusters(inputs, self.clusters).distance
        tiny = torch.finfo(distance.dtype).tiny
        return 1.001 * key_statistics(inputs).importance + distance.clamp_min(tiny).log()

    def select(self, inputs: Inputs) -> Graph:
        return shared_top(inputs, self.scores(inputs), self.count)

    def work(self, inputs: Inputs) -> Work:
        return Work(float(self.count), 4.0 * inputs.head_dim**2, shared=clustering_operations(inputs, self.clusters))

    @property
    def sharded(self) -> Sharded:
        return Sharded(score=self.scores, count=self.count)

    @property
    def alternatives(self) -> tuple[Selector, ...]:
        return (Leverage(self.count, centre=True), KeyNorm(self.count))

    def clustered(self, count: int) -> Outliers:
        return replace(self, clusters=count)
