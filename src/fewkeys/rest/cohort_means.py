"""Stand-ins of cohorts of queries: all cohorts share the clusters of keys, and each has its own means of them."""

import torch
from torch import Tensor

import fewkeys.native as native
from fewkeys.core.derivatives import constants
from fewkeys.core.graph import Graph
from fewkeys.core.inputs import Inputs
from fewkeys.native.tensors import wants_gradient
from fewkeys.rest.base import CohortStandIns, value_shift
from fewkeys.sketch.backend import compiled_at_once
from fewkeys.sketch.clusters import clusters, frame
from fewkeys.sketch.cohorts import cohorts
from fewkeys.sketch.gram import LEAST_DIRECTION, SUBSPACE_STEPS, product, top_subspace
from fewkeys.sketch.tilted import COHORT_TILT, LARGEST_TILT, tilted_sums

REACH = 0.25
"""How far the first-order term reaches along each of its r directions, in units of rms |v - mean v|."""
LARGEST_SPREAD = 2.0
"""The largest factor f_c of a cluster's first-order term."""


def cohort_means(inputs: Inputs, graph: Graph, count: int, rank: int, parts: int) -> CohortStandIns:
    """`ClusterMeans(count, rank, cohorts=parts)` beside the lists that `graph` has for the same cohorts.

    The equations are those of one cohort, with its mean m_h, the common covariance W in place of C, and t = 0.8
    (`fewkeys.sketch.tilted`). S is pooled over cohorts, too; bounds are around each cohort's own t m_h S.
    """
    x, cohort, columns = inputs, cohorts(inputs, parts), graph.columns
    if columns is None or columns.place is None:
        raise ValueError("rest: ClusterMeans(cohorts=...) needs the lists of Outliers(cohorts=...), got others")
    cluster = clusters(x, count)
    sums = tilted_sums(x, cohort, cluster, columns.index, columns.used, together=rank > 0)
    middle, together = frame(x).mean, sums.together
    if compiled_at_once(x) and not wants_gradient(x.key, x.value):
        tensors = {name: rows for name, rows in vars(sums).items() if name != "size"}
        tensors |= {"mean": cohort.mean, "within": cohort.within, "middle": middle, "unit": frame(x).unit}
        numbers = {"tilt": COHORT_TILT, "largest_tilt": LARGEST_TILT, "largest_spread": LARGEST_SPREAD, "reach": REACH}
        rank = min(rank, x.head_dim, x.value_dim)
        stand_ins = native.cohort_means(tensors, rank, SUBSPACE_STEPS, least=LEAST_DIRECTION, **numbers)
        return CohortStandIns(mass=sums.mass, size=sums.size, label=cluster.label, **stand_ins)
    mass, within = at_least_tiny(sums.mass).unsqueeze(-1), cohort.within.unsqueeze(2)
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
    pooled = (together - between) / at_least_tiny(sums.mass.sum((2, 3)))[..., None, None]
    with constants():
        factor = spread_factor(sums.energy / mass.squeeze(-1), square, sums.mass)
        reference = COHORT_TILT * (mean_query + on_key)
    left, right, bounds, moved = first_order(
        pooled.unsqueeze(2), within, rank, COHORT_TILT * mean_query, reference, frame(x).unit.unsqueeze(2)
    )
    value = value - factor.unsqueeze(-1) * moved
    left, right = (part.expand(-1, -1, key.shape[2], -1, -1) for part in (left, right))
    return CohortStandIns(key, value, bias, sums.mass, sums.size, cluster.label, left, right, factor, bounds)


def first_order(
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


def spread_factor(energy: Tensor, square: Tensor, mass: Tensor) -> Tensor:
    """f_c (..., C) from the mean `energy` `E (q . k_j)^2` of a cluster's keys and the `square` of its mean key."""
    # A cluster of equal keys has no spread: what rounding leaves of the difference must not become one.
    spread = torch.where(energy - square > 64 * torch.finfo(energy.dtype).eps * energy, energy - square, 0.0)
    mean = (spread * mass).sum(-1, keepdim=True) / at_least_tiny(mass.sum(-1, keepdim=True))
    return (spread / at_least_tiny(mean)).sqrt().clamp_max(LARGEST_SPREAD)


def at_least_tiny(total: Tensor) -> Tensor:
    """A safe divisor: empty clusters have no mass."""
    return total.clamp_min(1e-30)
