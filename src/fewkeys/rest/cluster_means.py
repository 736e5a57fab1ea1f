"""Cluster means: every group of similar keys is one more key."""

from dataclasses import dataclass

import torch
from torch import Tensor

import fewkeys.native as native
from fewkeys.core.derivatives import constants
from fewkeys.core.graph import Graph
from fewkeys.core.inputs import Inputs
from fewkeys.core.validation import check_cohorts, check_count
from fewkeys.core.weights import Softmax, Weights
from fewkeys.core.work import PER_SCORE, Work, per_score
from fewkeys.native.tensors import wants_gradient
from fewkeys.rest.base import CohortStandIns, CountedRest, StandIns, unkept, value_shift
from fewkeys.select.base import Selector
from fewkeys.sketch.backend import compiled_at_once
from fewkeys.sketch.clusters import TILT, clustering_operations, clusters, frame, key_statistics, query_moments
from fewkeys.sketch.cohorts import cohorts
from fewkeys.sketch.gram import LEAST_DIRECTION, SUBSPACE_STEPS, product, top_subspace
from fewkeys.sketch.sums import label_sums
from fewkeys.sketch.tilted import COHORT_TILT, LARGEST_TILT, tilted_sums

REACH = 0.25
"""How far the first-order term reaches along each of its r directions, in units of rms |v - mean v|."""
LARGEST_SPREAD = 2.0
"""The largest factor f_c of a cluster's first-order term."""


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
            return _cohort_means(inputs, graph, self)
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
        mass = _at_least_tiny(mass).unsqueeze(-1)
    middle = frame(x).mean if rank else None
    sums, products = label_sums(x.key, x.value, label, share, count, x.impl, middle)
    mean_key, mean_value = (totals.sum(part) / mass for part in sums.split([x.head_dim, x.value_dim], -1))
    if importance is None:
        return StandIns(mean_key, mean_value, label, share)
    units, moments = frame(x), query_moments(x)
    with constants():
        offset = mean_key - units.mean
        bias = (TILT * (importance - moments.log_mean_exp(offset))).clamp(-LARGEST_TILT, LARGEST_TILT)
    if products is None:
        return StandIns(mean_key, mean_value, label, share, bias)

    # The mean of (k_j - key_c)(v_j - value_c)^T, multiplied out: differences of all keys are never stored.
    between = product((mass * (mean_key - units.mean)).mT, mean_value)
    pooled = (totals.sum(products) - between) / mass.sum(-2, keepdim=True)
    with constants():
        square = torch.linalg.vector_norm(offset @ units.root, dim=-1).square()
        energy = share.new_zeros(bias.shape).scatter_add_(-1, label, share * key_statistics(x).spread)
        factor = _spread_factor(totals.sum(energy) / mass.squeeze(-1), square, mass.squeeze(-1))
        covariance = moments.second - moments.mean.mT @ moments.mean
        reference = TILT * (moments.mean + offset @ covariance)
    left, right, bounds, moved = _first_order(pooled, moments.second, rank, TILT * moments.mean, reference, units.unit)
    value = mean_value - factor.unsqueeze(-1) * moved
    return StandIns(mean_key, value, label, share, bias, left, right, factor, bounds=bounds)


def _cohort_means(inputs: Inputs, graph: Graph, rest: ClusterMeans) -> CohortStandIns:
    """The stand-ins of several cohorts beside the lists that `graph` has for them.

    The equations are those of one cohort, with its mean m_h, the common covariance W in place of C, and t = 0.8. S is
    pooled over cohorts, too; bounds are around each cohort's own t m_h S.
    """
    x, cohort, columns, rank = inputs, cohorts(inputs, rest.cohorts), graph.columns, rest.rank
    if columns is None or columns.place is None:
        raise ValueError("rest: ClusterMeans(cohorts=...) needs the lists of Outliers(cohorts=...), got others")
    cluster = clusters(x, rest.count)
    sums = tilted_sums(x, cohort, cluster, columns.index, columns.used, together=rank > 0)
    middle, together = frame(x).mean, sums.together
    if compiled_at_once(x) and not wants_gradient(x.key, x.value):
        tensors = {name: rows for name, rows in sums._asdict().items() if name != "size"}
        tensors |= {"mean": cohort.mean, "within": cohort.within, "middle": middle, "unit": frame(x).unit}
        numbers = {"tilt": COHORT_TILT, "largest_tilt": LARGEST_TILT, "largest_spread": LARGEST_SPREAD, "reach": REACH}
        rank = min(rank, x.head_dim, x.value_dim)
        stand_ins = native.cohort_means(tensors, rank, SUBSPACE_STEPS, least=LEAST_DIRECTION, **numbers)
        return CohortStandIns(mass=sums.mass, size=sums.size, label=cluster.label, **stand_ins)
    mass, within = _at_least_tiny(sums.mass).unsqueeze(-1), cohort.within.unsqueeze(2)
    offset, value = sums.key / mass, sums.value / mass
    with constants():
        on_key = offset @ within
        square, mean_query = (on_key * offset).sum(-1), cohort.mean.unsqueeze(3)
        importance = (offset * mean_query).sum(-1) + 0.5 * square
        bias = (COHORT_TILT * (sums.level - importance)).clamp(-LARGEST_TILT, LARGEST_TILT)
    key = offset + middle.unsqueeze(2)
    if together is None:
        return CohortStandIns(key, value, bias, sums.mass, sums.size, cluster.label)
    between = product((sums.mass.unsqueeze(-1) * offset).flatten(2, 3).mT, value.flatten(2, 3))
    pooled = (together - between) / _at_least_tiny(sums.mass.sum((2, 3)))[..., None, None]
    with constants():
        factor = _spread_factor(sums.energy / mass.squeeze(-1), square, sums.mass)
        reference = COHORT_TILT * (mean_query + on_key)
    left, right, bounds, moved = _first_order(
        pooled.unsqueeze(2), within, rank, COHORT_TILT * mean_query, reference, frame(x).unit.unsqueeze(2)
    )
    value = value - factor.unsqueeze(-1) * moved
    left, right = (part.expand(-1, -1, key.shape[2], -1, -1) for part in (left, right))
    return CohortStandIns(key, value, bias, sums.mass, sums.size, cluster.label, left, right, factor, bounds)


def _first_order(
    pooled: Tensor, metric: Tensor, rank: int, middle: Tensor, reference: Tensor, unit: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`left`, `right` and `bounds` of `StandIns` from S (..., D, Dv), and the values' move (..., C, Dv) at `reference`.

    S is cut to the rank in the metric (..., D, D) of queries; `middle` (..., 1, D): t times the mean query; reference
    (..., C, D): the queries at which the values are right; `unit`: of `Frame`.
    """
    with constants():
        right = top_subspace(product(product(pooled.mT, metric), pooled), min(rank, *pooled.shape[-2:])).mT
    left = product(pooled, right.mT)
    with constants():
        around = middle @ left
        bounds = torch.cat([around, (REACH / unit).expand_as(around)], -2)
    return left, right, bounds, value_shift(reference, left, right, bounds)


def _spread_factor(energy: Tensor, square: Tensor, mass: Tensor) -> Tensor:
    """f_c (..., C) from the mean `energy` `E (q . k_j)^2` of a cluster's keys and the `square` of its mean key."""
    # A cluster of equal keys has no spread: what rounding leaves of the difference must not become one.
    spread = torch.where(energy - square > 64 * torch.finfo(energy.dtype).eps * energy, energy - square, 0.0)
    mean = (spread * mass).sum(-1, keepdim=True) / _at_least_tiny(mass.sum(-1, keepdim=True))
    return (spread / _at_least_tiny(mean)).sqrt().clamp_max(LARGEST_SPREAD)


def _at_least_tiny(total: Tensor) -> Tensor:
    """A safe divisor: empty clusters have no mass."""
    return total.clamp_min(1e-30)
