"""Every group of similar keys is one more key."""

from dataclasses import dataclass

import torch
from torch import Tensor

from fewkeys.core.derivatives import constants
from fewkeys.core.graph import Graph
from fewkeys.core.inputs import Inputs
from fewkeys.core.validation import check_cohorts, check_count
from fewkeys.core.weights import Softmax, Weights
from fewkeys.core.work import PER_SCORE, Work, per_score
from fewkeys.native import kernels
from fewkeys.native.tensors import wants_gradient
from fewkeys.rest.base import CountedRest, StandIns, value_shift
from fewkeys.select.base import Selector
from fewkeys.sketch.backend import compiled_at_once
from fewkeys.sketch.clusters import clustering_operations, clusters, frame
from fewkeys.sketch.cohorts import Cohorts, cohorts
from fewkeys.sketch.gram import LEAST_DIRECTION, SUBSPACE_STEPS, product, top_subspace
from fewkeys.sketch.tilted import LARGEST_TILT, tilted_sums

REACH = 0.25
"""How far the first-order term reaches along each direction, in units of rms |v - mean v|."""
LARGEST_SPREAD = 2.0
"""The largest factor f_c."""


@dataclass(frozen=True)
class ClusterMeans(CountedRest):
    """The keys in `count` clusters (`fewkeys.sketch.clusters`), each represented by one key and one value.

    Under `Softmax`, with importance g and its mean over the cluster g_c, the keys outside the list that all queries
    share weigh `e_j = exp(t (g_j - g_c))`, t = 1/2, as for a query halfway between indifferent and fully attending to
    the cluster. Then

        key_c = sum e_j k_j / sum e_j        value_c = sum e_j v_j / sum e_j
        weight = (sum e_j) (the part of these keys that q does not keep) exp(scale q . key_c - t (g(key_c) - g_c))

    so the mass is right at that query. `rank` r > 0 adds the first order:

        value_c + f_c (q - t (m + C key_c))^T S,   S = sum e_j (k_j - key_c)(v_j - value_c)^T / sum e_j

    with m and C the queries' mean and covariance, S pooled over clusters and cut to rank r in the metric C, and
    f_c = sqrt(spread of cluster c / mean spread) at most 2. Along each of the r directions, orthonormal in the values,
    q S and t (m + C key_c) S stay within `REACH` rms |v - mean v| of t m S, so the output is at most
    `(1 + sqrt(r)) max |v|`. Other weights have plain means, and no rank.

    `cohorts` H > 1: each of H cohorts of similar queries (`fewkeys.sketch.cohorts`) has its own stand-ins beside the
    lists of `Outliers` of as many cohorts, by its own m, one covariance within cohorts, and t = 0.8. Cost
    O(n H (D + Dv)) besides; `Softmax` only.

    Slots: count, plus r for the first-order term, plus `count / (D + Dv)` for the factors f_c. Gradients flow through
    the means and S, not through clusters, e_j, f_c, the subspace of S and the correction of the mass. Not causal.
    """

    rank: int = 0
    cohorts: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        check_cohorts("ClusterMeans", self.cohorts)
        check_count("ClusterMeans rank", self.rank, least=0)

    def check(self, weights: Weights) -> None:
        super().check(weights)
        if (self.cohorts > 1 or self.rank) and not isinstance(weights, Softmax):
            raise ValueError(f"rest: ClusterMeans with cohorts or a rank is defined for Softmax(), got {weights}")

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
            raise ValueError(f"keep: ClusterMeans needs rules for cohorts={self.cohorts}, got {keep}")
        if self.cohorts == 1:
            super().check_beside(keep)

    def prepare(self, inputs: Inputs, graph: Graph, weights: Weights) -> StandIns:
        cohort = cohorts(inputs, self.cohorts)
        return _stand_ins(inputs, graph, self, cohort, cohort.tilt if isinstance(weights, Softmax) else 0.0)


def _stand_ins(inputs: Inputs, graph: Graph, rest: ClusterMeans, cohort: Cohorts, tilt: float) -> StandIns:
    """`tilt`: t, zero for plain means. S is pooled over cohorts; bounds are around each cohort's own t m_h S."""
    x = inputs
    columns = graph.shared if cohort.are_one else graph.columns
    if columns is None and cohort.are_one:
        empty = cohort.place[..., :0]
        columns = cohort.lists(empty, empty.bool())
    if columns is None or columns.blocks != cohort.count:
        raise ValueError("rest: ClusterMeans(cohorts=...) needs the lists of Outliers(cohorts=...), got others")
    cluster, rank = clusters(x, rest.count), min(rest.rank, x.head_dim, x.value_dim)
    sums = tilted_sums(x, cohort, cluster, columns, tilt, together=rank > 0)
    middle, unit = frame(x).mean, frame(x).unit
    if compiled_at_once(x) and not wants_gradient(x.key, x.value):
        tensors = {name: rows for name, rows in sums._asdict().items() if name != "size"}
        tensors |= {"mean": cohort.mean, "within": cohort.within, "middle": middle, "unit": unit}
        numbers = {"tilt": tilt, "largest_tilt": LARGEST_TILT, "largest_spread": LARGEST_SPREAD, "reach": REACH}
        stand_ins = kernels.cohort_means(tensors, rank, SUBSPACE_STEPS, least=LEAST_DIRECTION, **numbers)
        bias = stand_ins.pop("bias")
        return StandIns(mass=sums.mass, size=sums.size, label=cluster.label, bias=bias if tilt else None, **stand_ins)
    mass, within = _at_least_tiny(sums.mass).unsqueeze(-1), cohort.within.unsqueeze(2)
    offset, value = sums.key / mass, sums.value / mass
    with constants():
        on_key = offset @ within
        square, mean_query = (on_key * offset).sum(-1), cohort.mean.unsqueeze(3)
        importance = (offset * mean_query).sum(-1) + 0.5 * square
        bias = (tilt * (sums.level - importance)).clamp(-LARGEST_TILT, LARGEST_TILT)
    key = offset + middle.unsqueeze(2)
    if sums.together is None:
        return StandIns(key, value, sums.mass, sums.size, cluster.label, bias if tilt else None)
    between = product((sums.mass.unsqueeze(-1) * offset).flatten(2, 3).mT, value.flatten(2, 3))
    pooled = (sums.together - between) / _at_least_tiny(sums.mass.sum((2, 3)))[..., None, None]
    pooled = pooled.unsqueeze(2)
    with constants():
        right = top_subspace(product(product(pooled.mT, within), pooled), rank).mT
    left = product(pooled, right.mT)
    with constants():
        factor = _spread_factor(sums.energy / mass.squeeze(-1), square, sums.mass)
        around = tilt * mean_query @ left
        bounds = torch.cat([around, (REACH / unit.unsqueeze(2)).expand_as(around)], -2)
        reference = tilt * (mean_query + on_key)
    value = value - factor.unsqueeze(-1) * value_shift(reference, left, right, bounds)
    left, right = (part.expand(-1, -1, cohort.count, -1, -1) for part in (left, right))
    return StandIns(key, value, sums.mass, sums.size, cluster.label, bias, left, right, factor, bounds=bounds)


def _spread_factor(energy: Tensor, square: Tensor, mass: Tensor) -> Tensor:
    """f_c (..., C) from `energy`, the mean `E (q . k_j)^2` of a cluster's keys, and the `square` of its mean key."""
    # A cluster of equal keys has no spread: what rounding leaves of the difference must not become one.
    spread = energy - square
    spread = spread.where(spread > 64 * torch.finfo(energy.dtype).eps * energy, 0.0)
    mean = (spread * mass).sum(-1, keepdim=True) / _at_least_tiny(mass.sum(-1, keepdim=True))
    return (spread / _at_least_tiny(mean)).sqrt().clamp_max(LARGEST_SPREAD)


def _at_least_tiny(total: Tensor) -> Tensor:
    """A safe divisor: empty clusters have no mass."""
    return total.clamp_min(1e-30)
