"""Cluster means: every group of similar keys is one more key."""

from dataclasses import dataclass

import torch
from torch import Tensor

from fewkeys.core.derivatives import constants
from fewkeys.core.graph import Graph
from fewkeys.core.inputs import Inputs
from fewkeys.core.validation import check_cohorts, check_count
from fewkeys.core.weights import Softmax, Weights
from fewkeys.core.work import PER_SCORE, Work, per_score
from fewkeys.rest.base import CohortStandIns, CountedRest, StandIns, unkept
from fewkeys.rest.cohort_means import at_least_tiny, cohort_means, first_order, spread_factor
from fewkeys.select.base import Selector
from fewkeys.sketch.clusters import TILT, clustering_operations, clusters, frame, key_statistics, query_moments
from fewkeys.sketch.gram import product
from fewkeys.sketch.sums import label_sums, sums_and_products
from fewkeys.sketch.tilted import LARGEST_TILT


@dataclass(frozen=True)
class ClusterMeans(CountedRest):
    """The keys in `count` clusters (`fewkeys.sketch.clusters`), each represented by one key and one value.

    Under `Softmax`, with t = 1/2, importance g and its mean over the cluster g_c, keys weigh
    `e_j = exp(t (g_j - g_c))`, as for a query halfway between indifferent and fully attending to the cluster. Then

        key_c = sum e_j k_j / sum e_j        value_c = sum e_j v_j / sum e_j
        weight = (sum of e_j over keys the query does not keep) exp(scale q . key_c - t (g(key_c) - g_c))

    so the mass is right at that query. `rank` r > 0 adds the first order, since the value moves with the key:

        value_c + f_c (q - t (m + C key_c))^T S,   S = sum e_j (k_j - key_c)(v_j - value_c)^T / sum e_j

    with S pooled over clusters and cut to rank r in the query metric, f_c = sqrt(spread of cluster c / mean spread) at
    most 2, and m, C the queries' mean and covariance. Along each of the r directions, orthonormal in the values, q S
    and t (m + C key_c) S stay within `REACH` rms |v - mean v| of t m S, so the output is at most
    `(1 + sqrt(r)) max |v|`. Other weights have plain means, and no rank.

    `cohorts` H > 1: each of H cohorts of similar queries (`fewkeys.sketch.cohorts`) has its own stand-ins, by its own
    importance, with t = 0.8 (`fewkeys.sketch.tilted`), beside `Outliers` of as many cohorts and `Window`. Cost
    O(n H (D + Dv)) besides; `Softmax` only.

    Slots: count, plus r for the first-order term, plus `count / (D + Dv)` for the factors f_c. Gradients flow through
    the means and S; clusters, e_j, f_c, the subspace of S and the correction of the mass are choices and carry none.
    Not causal.
    """

    rank: int = 0
    cohorts: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        check_cohorts("ClusterMeans", self.cohorts)
        check_count("ClusterMeans rank", self.rank, least=0)

    def check(self, weights: Weights) -> None:
        super().check(weights)
        for name, value, usual in (("cohorts", self.cohorts, 1), ("rank", self.rank, 0)):
            if value != usual and not isinstance(weights, Softmax):
                raise ValueError(f"rest: ClusterMeans({name}={value}) is defined for Softmax(), got {weights}")

    def slots(self, head_dim: int, value_dim: int) -> float:
        if not self.rank:
            return super().slots(head_dim, value_dim)
        return self.count + self.rank + self.count / (head_dim + value_dim)

    def work(self, inputs: Inputs, keep: Selector) -> Work:
        x, kept = inputs, keep.work(inputs)
        scores = self.slots(x.head_dim, x.value_dim)
        each = 2.0 * self.cohorts * (x.head_dim + x.value_dim + PER_SCORE) if self.cohorts > 1 else 0.0
        if kept.banded:
            # The number of keys of each cluster that a query keeps differs from query to query in a band.
            scores += 2 * self.count * kept.scores / per_score(x)
        return Work(scores, 2.0 * x.head_dim * x.value_dim + each, shared=clustering_operations(x, self.count))

    @property
    def clusters(self) -> int:
        return self.count

    def check_beside(self, keep: Selector) -> None:
        if keep.cohort_lists != self.cohorts:
            raise ValueError(
                f"keep: ClusterMeans(cohorts={self.cohorts}) needs rules for the same cohorts, "
                f"{'Outliers(cohorts=...)' if self.cohorts > 1 else 'cohorts=1'}, got {keep}"
            )

    def prepare(self, inputs: Inputs, graph: Graph, weights: Weights) -> StandIns | CohortStandIns:
        if self.cohorts > 1:
            return cohort_means(inputs, graph, self.count, self.rank, self.cohorts)
        parts = clusters(inputs, self.count)
        return represent(inputs, graph, weights, parts.label, self.count, parts.importance, self.rank)


def represent(
    inputs: Inputs,
    graph: Graph,
    weights: Weights,
    label: Tensor,
    count: int,
    importance: Tensor | None = None,
    rank: int = 0,
) -> StandIns:
    """The stand-ins of `ClusterMeans` for any partition of the keys.

    `label` (B, Hkv, Nk): the cluster of every real key, 0 .. count - 1; `importance` (B, Hkv, count): the mean
    importance g_c, which `Softmax` needs for other than plain means.
    """
    x, totals = inputs, inputs.whole.totals
    if not isinstance(weights, Softmax):
        importance = None
    with constants():
        share = unkept(x, graph)
        if importance is not None:
            log_e = TILT * (key_statistics(x).importance - importance.gather(-1, label))
            share = share * log_e.clamp_(-LARGEST_TILT, LARGEST_TILT).exp_()
        mass = totals.sum(share.new_zeros((*share.shape[:2], count)).scatter_add_(-1, label, share))
        mass = at_least_tiny(mass).unsqueeze(-1)
    args = x.key, x.value, label, share, count
    if rank:
        key_sum, value_sum, products = sums_and_products(*args, frame(x).mean, x.impl)
    else:
        key_sum, value_sum = label_sums(*args, x.impl)
    mean_key, mean_value = totals.sum(key_sum) / mass, totals.sum(value_sum) / mass
    if importance is None:
        return StandIns(mean_key, mean_value, label, share)
    units, moments = frame(x), query_moments(x)
    with constants():
        offset = mean_key - units.mean
        bias = (TILT * (importance - moments.log_mean_exp(offset))).clamp(-LARGEST_TILT, LARGEST_TILT)
    if not rank:
        return StandIns(mean_key, mean_value, label, share, bias)

    # The mean of (k_j - key_c)(v_j - value_c)^T, multiplied out: differences of all keys are never stored.
    between = product((mass * (mean_key - units.mean)).mT, mean_value)
    pooled = (totals.sum(products) - between) / mass.sum(-2, keepdim=True)
    with constants():
        square = torch.linalg.vector_norm(offset @ units.root, dim=-1).square()
        energy = share.new_zeros(bias.shape).scatter_add_(-1, label, share * key_statistics(x).spread)
        factor = spread_factor(totals.sum(energy) / mass.squeeze(-1), square, mass.squeeze(-1))
        covariance = moments.second - moments.mean.mT @ moments.mean
        reference = TILT * (moments.mean + offset @ covariance)
    left, right, bounds, moved = first_order(pooled, moments.second, rank, TILT * moments.mean, reference, units.unit)
    value = mean_value - factor.unsqueeze(-1) * moved
    return StandIns(mean_key, value, label, share, bias, left, right, factor, bounds=bounds)
