"""Cluster means: every group of similar keys is one more key."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fewkeys.core.derivatives import constants
from fewkeys.core.graph import Graph
from fewkeys.core.inputs import Inputs
from fewkeys.core.totals import Totals
from fewkeys.core.validation import check_cohorts, check_count
from fewkeys.core.weights import Softmax, Weights
from fewkeys.core.work import PER_SCORE, Work, per_score
from fewkeys.rest.base import CohortStandIns, Rest, StandIns, bounds_around, unkept, within_reach
from fewkeys.rest.cohort_means import LARGEST_SPREAD, cohort_means
from fewkeys.select.base import Selector
from fewkeys.sketch.clusters import TILT, clustering_operations, clusters, frame, key_statistics, query_moments
from fewkeys.sketch.gram import product, top_subspace
from fewkeys.sketch.sums import label_sums, sums_and_products
from fewkeys.sketch.tilted import LARGEST_TILT


@dataclass(frozen=True)
class ClusterMeans(Rest):
    """`count` clusters of the keys, each represented by one key, one value and the number of its keys.

    Clusters are those of `fewkeys.sketch.clusters`. Under `Softmax`, with t = 1/2, importance g and its mean over the
    cluster g_c, the members weigh `e_j = exp(t (g_j - g_c))`: the average that a query halfway between indifferent and
    fully attending to the cluster would take. Then

        key_c = sum e_j k_j / sum e_j        value_c = sum e_j v_j / sum e_j
        weight = (sum of e_j over keys the query does not keep) exp(scale q . key_c - t (g(key_c) - g_c))

    so the stand-in's mass is right at that query. `rank` r > 0 adds the first order in the query: inside a cluster the
    value moves with the key, so the stand-in's value at query q is

        value_c + f_c (q - t (m + C key_c))^T S,   S = sum e_j (k_j - key_c)(v_j - value_c)^T / sum e_j

    with S pooled over clusters and cut to rank r in the query metric,
    f_c = sqrt(spread of cluster c / mean spread) at most 2, and m, C the queries' mean and covariance. Along each of
    the r directions, orthonormal in the values, q S and t (m + C key_c) S stay within `REACH` rms |v - mean v| of
    t m S: a cluster's average lies between its values however strong the scores are, a line through it does not. So
    the output is at most `(1 + sqrt(r)) max |v|` (a cluster moves by f_c 2 REACH sqrt(r) rms |v - mean v| at most).
    Other kernels
    have no such tilt: they take plain means, and rank must be 0.

    `cohorts` H > 1: clusters are common, but each of H cohorts of similar queries (`fewkeys.sketch.cohorts`) has its
    own stand-ins, by its own importance, with t = 0.8 (`fewkeys.sketch.tilted`), beside `Outliers` of as many cohorts
    and `Window`. Cost O(n H (D + Dv)) besides; `Softmax` only.

    Slots: count, plus r for the first-order term, plus `count / (D + Dv)` for the factors f_c.
    Gradients flow through the means and S; clusters, e_j, f_c, the subspace of S and the correction of the mass are
    choices and carry none. Not causal.
    """

    count: int
    rank: int = 0
    cohorts: int = 1

    def __post_init__(self) -> None:
        check_count("ClusterMeans count", self.count)
        check_cohorts("ClusterMeans", self.cohorts)
        check_count("ClusterMeans rank", self.rank, least=0)

    def check(self, weights: Weights) -> None:
        super().check(weights)
        if self.cohorts > 1 and not isinstance(weights, Softmax):
            raise ValueError(f"rest: ClusterMeans(cohorts={self.cohorts}) is defined for Softmax(), got {weights}")
        if self.rank and not isinstance(weights, Softmax):
            raise ValueError(f"rest: ClusterMeans(rank={self.rank}) is defined for Softmax(), got {weights}")

    def slots(self, head_dim: int, value_dim: int) -> float:
        if not self.rank:
            return float(self.count)
        return self.count + self.rank + self.count / (head_dim + value_dim)

    def work(self, inputs: Inputs, keep: Selector) -> Work:
        x, kept, scores = inputs, keep.work(inputs), self.slots(inputs.head_dim, inputs.value_dim)
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
    """Stand-ins as `ClusterMeans` says, for any partition of the keys.

    `label` (B, Hkv, Nk) tells the cluster of every real key, 0 .. count - 1; `importance` (B, Hkv, count) the mean
    importance g_c, which `Softmax` needs.
    """
    x, impl, totals = inputs, inputs.impl, inputs.whole.totals
    if not isinstance(weights, Softmax) or importance is None:
        share = unkept(inputs, graph)
        mass, sums = _mass(totals, label, share, count), label_sums(x.key, x.value, label, share, count, impl)
        mean_key, mean_value = (totals.sum(part) / mass for part in sums)
        return StandIns(mean_key, mean_value, label, share)
    units, seen, moments = frame(inputs), key_statistics(inputs), query_moments(inputs)
    with constants():
        log_e = TILT * (seen.importance - importance.gather(-1, label))
        share = unkept(inputs, graph) * log_e.clamp_(-LARGEST_TILT, LARGEST_TILT).exp_()
    mass = _mass(totals, label, share, count)
    if rank:
        key_sum, value_sum, products = sums_and_products(x.key, x.value, label, share, count, units.mean, impl)
    else:
        key_sum, value_sum = label_sums(x.key, x.value, label, share, count, impl)
    mean_key, mean_value = totals.sum(key_sum) / mass, totals.sum(value_sum) / mass
    with constants():
        offset = mean_key - units.mean
        bias = (TILT * (importance - moments.log_mean_exp(offset))).clamp(-LARGEST_TILT, LARGEST_TILT)
    if not rank:
        return StandIns(mean_key, mean_value, label, share, bias)

    # The mean of (k_j - key_c)(v_j - value_c)^T, multiplied out: differences of all keys are never stored.
    between = product((mass * (mean_key - units.mean)).mT, mean_value)
    pooled = (totals.sum(products) - between) / mass.sum(-2, keepdim=True)
    with constants():
        second = moments.second
        right = top_subspace(product(product(pooled.mT, second), pooled), min(rank, *pooled.shape[-2:])).mT
        here = torch.linalg.vector_norm(offset @ units.root, dim=-1, keepdim=True).square()
        energy = share.new_zeros(bias.shape).scatter_add_(-1, label, share * seen.spread)
        energy = totals.sum(energy.unsqueeze(-1)) / mass
        # A cluster of equal keys has no spread: the rounding error of the difference must not become one.
        spread = torch.where(energy - here > 64 * torch.finfo(here.dtype).eps * energy, energy - here, 0.0)
        relative = spread / _at_least_tiny((spread * mass).sum(-2, keepdim=True) / mass.sum(-2, keepdim=True))
        factor = relative.sqrt().clamp_max(LARGEST_SPREAD).squeeze(-1)
        reference = TILT * (moments.mean + offset @ moments.covariance)
    left = product(pooled, right.mT)
    with constants():
        bounds = bounds_around(TILT * moments.mean @ left, units.unit)
    moved = mean_value - factor.unsqueeze(-1) * (within_reach(reference @ left, bounds) @ right)
    return StandIns(mean_key, moved, label, share, bias, left, right, factor, bounds=bounds)


def _mass(totals: Totals, label: Tensor, share: Tensor, count: int) -> Tensor:
    """Every cluster's weight, (B, Hkv, C, 1)."""
    with constants():
        mass = share.new_zeros((*share.shape[:2], count)).scatter_add_(-1, label, share)
        return _at_least_tiny(totals.sum(mass)).unsqueeze(-1)


def _at_least_tiny(total: Tensor) -> Tensor:
    """A safe divisor: sums of weights, where an empty cluster has none."""
    return total.clamp_min(1e-30)
