"""Stand-ins of every cohort of queries: clusters are common, what speaks for them is each cohort's own."""

from __future__ import annotations

import torch
from torch import Tensor

import fewkeys.native as native
from fewkeys.core.derivatives import constants
from fewkeys.core.graph import Graph
from fewkeys.core.inputs import Inputs
from fewkeys.rest.base import REACH, StandIns, bounds_around
from fewkeys.sketch.backend import compiled
from fewkeys.sketch.clusters import clusters, frame
from fewkeys.sketch.cohorts import cohorts
from fewkeys.sketch.gram import LEAST_DIRECTION, SUBSPACE_STEPS, product, top_subspace
from fewkeys.sketch.tilted import LARGEST_TILT, TILT, tilted_sums

LARGEST_SPREAD = 2.0


def cohort_means(inputs: Inputs, graph: Graph, count: int, rank: int, parts: int) -> StandIns:
    """`ClusterMeans(count, rank, cohorts=parts)` beside the lists that `graph` has for the same cohorts.

    The equations are those of one cohort of all queries with its own mean m_h, the common covariance W in place of C,
    and t = 0.8 (`fewkeys.sketch.tilted`). S is pooled over cohorts too; bounds are around each cohort's own t m_h S.
    """
    x, known, columns = inputs, cohorts(inputs, parts), graph.columns
    if columns is None or columns.place is None:
        raise ValueError("rest: ClusterMeans(cohorts=...) needs the lists of Outliers(cohorts=...), got others")
    told = tilted_sums(x, known, clusters(x, count), columns.index, columns.used, together=rank > 0)
    middle, spoken = frame(x).mean, told.mass.flatten(1, 2)
    none = torch.zeros((*spoken.shape[:2], 0), dtype=torch.int64, device=spoken.device)
    together = told.together
    if together is not None and compiled(x, x.key, x.value, known.mean):
        given = {"mass": told.mass, "energy": told.energy, "level": told.importance}
        given |= {"key": told.key, "value": told.value}
        given |= {"together": together, "mean": known.mean, "within": known.within}
        given |= {"middle": middle, "unit": frame(x).unit}
        numbers = {"tilt": TILT, "largest_tilt": LARGEST_TILT, "largest_spread": LARGEST_SPREAD, "reach": REACH}
        rank = min(rank, x.head_dim, x.value_dim)
        found = native.cohort_means(given, rank, SUBSPACE_STEPS, least=LEAST_DIRECTION, **numbers)
        return StandIns(label=none, share=none.to(spoken.dtype), mass=spoken, **found)
    mass = told.mass.clamp_min(1e-30).unsqueeze(-1)
    offset, value = told.key / mass, told.value / mass
    with constants():
        on_key = offset @ known.within.unsqueeze(2)
        square, query = (on_key * offset).sum(-1), known.mean.unsqueeze(3)
        seen = (offset * query).sum(-1) + 0.5 * square
        bias = (TILT * (told.importance - seen)).clamp(-LARGEST_TILT, LARGEST_TILT)
    left = right = factor = bounds = None
    if together is not None:
        between = product((told.mass.unsqueeze(-1) * offset).flatten(2, 3).mT, value.flatten(2, 3))
        pooled = (together - between) / told.mass.sum((2, 3))[..., None, None].clamp_min(1e-30)
        with constants():
            right = top_subspace(product(product(pooled.mT, known.within), pooled), min(rank, *pooled.shape[-2:])).mT
            factor = _factor(told.energy / mass.squeeze(-1), square, told.mass)
            reference = TILT * (query + on_key)
        left = product(pooled, right.mT)
        with constants():
            limits = bounds_around(TILT * query @ left.unsqueeze(2), frame(x).unit.unsqueeze(2))
        moved = (reference @ left.unsqueeze(2)).clamp(*limits.split(1, 3))
        value = value - factor.unsqueeze(-1) * (moved @ right.unsqueeze(2))
        bounds, each = limits.flatten(1, 2), (*known.mean.shape[:3], -1, -1)
        left, right = (part.unsqueeze(2).expand(each).flatten(1, 2) for part in (left, right))
        factor = factor.flatten(1, 2)
    key, value, bias = (part.flatten(1, 2) for part in (offset + middle.unsqueeze(2), value, bias))
    return StandIns(key, value, none, none.to(spoken.dtype), bias, left, right, factor, bounds=bounds, mass=spoken)


def _factor(energy: Tensor, square: Tensor, mass: Tensor) -> Tensor:
    """The root of every cluster's spread beside its cohort's mean spread, at most 2: (B, Hkv, H, C)."""
    # A cluster of equal keys has no spread: what rounding leaves of the difference must not become one.
    spread = torch.where(energy - square > 64 * torch.finfo(energy.dtype).eps * energy, energy - square, 0.0)
    mean = (spread * mass).sum(-1, keepdim=True) / mass.sum(-1, keepdim=True).clamp_min(1e-30)
    return (spread / mean.clamp_min(1e-30)).sqrt().clamp_max(LARGEST_SPREAD)
