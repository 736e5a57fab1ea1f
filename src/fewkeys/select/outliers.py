"""Keys that matter and that the mean of their cluster describes worst."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fewkeys.core.graph import Graph
from fewkeys.core.inputs import Inputs
from fewkeys.core.validation import check_count
from fewkeys.select.base import Selector, shared_top
from fewkeys.sketch.clusters import clusters, key_statistics


@dataclass(frozen=True)
class Outliers(Selector):
    """The `count` keys of largest `g_j / 2 + log |x_j - centre of its cluster|`, shared by all queries of a head.

    `g_j = log E_q exp(q . k_j)` is the key's importance and x_j its features (score spread and value, see
    `fewkeys.sketch.clusters`). Made to stand beside `rest=ClusterMeans(clusters)`: both read the same clusters, and
    what is kept here is what the cluster's stand-in would get most wrong. Cost O(n clusters (D + Dv)). Not causal.
    """

    count: int
    clusters: int

    def __post_init__(self) -> None:
        check_count("Outliers count", self.count)
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

    def covers(self, inputs: Inputs) -> bool:
        return self.count >= inputs.keys
