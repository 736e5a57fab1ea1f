"""Keys that matter and that the mean of their cluster describes worst."""

from dataclasses import dataclass

import torch
from torch import Tensor

from fewkeys.core.graph import Graph
from fewkeys.core.inputs import Inputs
from fewkeys.core.precision import working
from fewkeys.core.totals import row_maximum
from fewkeys.core.validation import check_cohorts, check_count
from fewkeys.core.work import Work
from fewkeys.native import kernels
from fewkeys.select.base import CountedSelector, of_valid, top_places
from fewkeys.sketch.backend import compiled_at_once
from fewkeys.sketch.clusters import NEAR, clustering_operations, clusters, frame, half_variance
from fewkeys.sketch.cohort_bias import bias_importance
from fewkeys.sketch.cohorts import Cohorts, cohorts

PAIR = 0.999
"""A factor of log distances: of two keys alone in a cluster, whose scores would be equal, the more important wins."""


@dataclass(frozen=True)
class Outliers(CountedSelector):
    """The `count` keys of largest `g_j / 2 + log |x_j - centre of its cluster|`, shared by all queries of a head.

    `g_j = log E_q exp(q . k_j)` is the key's importance and x_j its features (`fewkeys.sketch.clusters`). The clusters
    are those of `rest=ClusterMeans(clusters)`, which would represent these keys worst. Cost O(n clusters (D + Dv)). Not
    causal.

    `cohorts` H > 1, a power of two: each of H cohorts of similar queries (`fewkeys.sketch.cohorts`) has its own list,
    by its own importance g_hj, alone or beside `ClusterMeans` of as many cohorts. Cost O(n H D) besides. With a bias of
    distances, g_hj includes the cohort's bias at the key (`fewkeys.sketch.cohort_bias`); a list that all queries share
    ignores the bias, which would change it little.
    """

    clusters: int
    cohorts: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        check_count("Outliers clusters", self.clusters)
        check_cohorts("Outliers", self.cohorts)

    @property
    def cohort_lists(self) -> int:
        return self.cohorts

    def select(self, inputs: Inputs) -> Graph:
        return self.beside(inputs, Graph(inputs))

    def beside(self, inputs: Inputs, kept: Graph) -> Graph:
        x, parts, key = inputs, cohorts(inputs, self.cohorts), inputs.key.detach()
        bias = None if x.bias is None or parts.are_one else bias_importance(x, parts, x.bias, kept.band)
        if bias is None and compiled_at_once(x):
            facts = {"mean": parts.mean, "middle": frame(x).mean, "real": x.valid}
            facts["distance"] = clusters(x, self.clusters).distance
            facts |= {"half_variance": half_variance(x, parts.within)} if parts.are_one else {"within": parts.within}
            index, used, variance = kernels.best(key, facts, min(self.count, x.keys), near=NEAR, power=PAIR)
            x.remember((half_variance, parts.within), lambda: variance)
        else:
            scores = (parts.mean @ working(key).mT).add_(of_valid(x, self.common(x, parts)).unsqueeze(2))
            index, used = top_places(scores if bias is None else scores.add_(bias), self.count)
        return kept | Graph(x, columns=parts.lists(index, used))

    def common(self, inputs: Inputs, parts: Cohorts) -> Tensor:
        """(B, Hkv, Nk): the terms that all cohorts share."""
        distance = clusters(inputs, self.clusters).distance
        real = distance if inputs.valid is None else distance.masked_fill(~inputs.valid[:, None], 0.0)
        least = (NEAR * inputs.whole.totals.max(row_maximum(real))).clamp_min(torch.finfo(distance.dtype).tiny)
        return half_variance(inputs, parts.within) + PAIR * distance.maximum(least).log()

    def work(self, inputs: Inputs) -> Work:
        choosing = 4.0 * inputs.head_dim**2 + (2.0 * self.cohorts * inputs.head_dim if self.cohorts > 1 else 0.0)
        return Work(float(self.count), choosing, shared=clustering_operations(inputs, self.clusters))
