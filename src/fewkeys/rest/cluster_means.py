"""Cluster means: every group of similar keys is one more key."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fewkeys.graph import Graph
from fewkeys.inputs import Inputs
from fewkeys.rest.base import Rest, StandIns, unkept
from fewkeys.sketch.clusters import TILT, QueryMoments, centred_keys, clusters, importance, query_moments
from fewkeys.sketch.leverage import working
from fewkeys.validation import check_count
from fewkeys.weights import Softmax, Weights

LARGEST_TILT = 2.0
"""Exponents of the tilted weights are clamped to +-2: no key outweighs its cluster by more than e^4."""
LARGEST_SPREAD = 2.0
SUBSPACE_STEPS = 3


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

        value_c + f_c (q - t (m + C key_c))^T S,   S = pooled sum e_j (k_j - key_c)(v_j - value_c)^T / sum e_j

    with S cut to rank r in the query metric, and f_c = sqrt(spread of cluster c / mean spread) at most 2, C and m the
    queries' covariance and mean. Other kernels have no such tilt: they take plain means, and rank must be 0.

    Slots: count, plus r for the first-order term, plus `count / (D + Dv)` for the factors f_c.
    Gradients flow through the means and S; clusters, e_j, f_c, the subspace of S and the correction of the mass are
    choices and carry none. Not causal.
    """

    count: int
    rank: int = 0

    def __post_init__(self) -> None:
        check_count("ClusterMeans count", self.count)
        check_count("ClusterMeans rank", self.rank, least=0)

    def check(self, weights: Weights) -> None:
        super().check(weights)
        if self.rank and not isinstance(weights, Softmax):
            raise ValueError(f"rest: ClusterMeans(rank={self.rank}) is defined for Softmax(), got {weights}")

    def slots(self, head_dim: int, value_dim: int) -> float:
        if not self.rank:
            return float(self.count)
        return self.count + self.rank + self.count / (head_dim + value_dim)

    def prepare(self, inputs: Inputs, graph: Graph, weights: Weights) -> StandIns:
        tilted = isinstance(weights, Softmax)
        member = clusters(inputs, self.count).member * unkept(inputs, graph).unsqueeze(-1)
        moments = query_moments(inputs)
        g_mean = None
        if tilted:
            g = importance(inputs).unsqueeze(-1)
            g_mean = (member.mT @ g) / member.sum(-2).clamp_min(1e-30).unsqueeze(-1)
            log_e = (TILT * (g - member @ g_mean)).clamp(-LARGEST_TILT, LARGEST_TILT)
            member = member * log_e.exp()
        key, value = working(inputs.key), working(inputs.value)
        mass = member.sum(-2).unsqueeze(-1)
        share = member.mT / mass.clamp_min(1e-30)
        mean_key, mean_value = share @ key, share @ value
        if g_mean is None:
            return StandIns(mean_key, mean_value, member)
        with torch.no_grad():
            offset = share @ centred_keys(inputs)
            bias = (TILT * (g_mean.squeeze(-1) - moments.log_mean_exp(offset))).clamp(-LARGEST_TILT, LARGEST_TILT)
        if not self.rank:
            return StandIns(mean_key, mean_value, member, bias)
        # The means of all keys and values cancel in S; taking them out first keeps the sums small and accurate.
        middle, centre = (offset - mean_key).detach().mean(-2, keepdim=True), value.detach().mean(-2, keepdim=True)
        left, right, factor = self._first_order(
            moments, member, mass, key + middle, value - centre, mean_key + middle, mean_value - centre
        )
        reference = TILT * (moments.mean + offset @ moments.covariance)
        moved = mean_value - factor.unsqueeze(-1) * (reference @ left @ right)
        return StandIns(mean_key, moved, member, bias, left, right, factor)

    def _first_order(
        self,
        moments: QueryMoments,
        member: Tensor,
        mass: Tensor,
        key: Tensor,
        value: Tensor,
        mean_key: Tensor,
        mean_value: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        # sum_j e_j (k - key_c)(v - value_c)^T = sum_j e_j k v^T - sum_c mass_c key_c value_c^T
        weight = member.sum(-1, keepdim=True)
        total = mass.sum(-2, keepdim=True).clamp_min(1e-30)
        pooled = ((key * weight).mT @ value - (mean_key * mass).mT @ mean_value) / total
        with torch.no_grad():
            second = moments.second
            right = top_subspace(pooled.mT @ second @ pooled, min(self.rank, *pooled.shape[-2:])).mT
            within = (member.mT @ _energy(key, second) / mass.clamp_min(1e-30) - _energy(mean_key, second)).clamp_min(0)
            mean = (within * mass).sum(-2, keepdim=True) / total
            factor = (within / mean.clamp_min(1e-30)).sqrt().clamp_max(LARGEST_SPREAD).squeeze(-1)
        return pooled @ right.mT, right, factor


def _energy(rows: Tensor, metric: Tensor) -> Tensor:
    """`x^T M x` (..., N, 1) for rows x."""
    return ((rows @ metric) * rows).sum(-1, keepdim=True)


def top_subspace(matrix: Tensor, rank: int) -> Tensor:
    """Orthonormal columns (..., D, rank) near the leading eigenvectors of a positive semidefinite matrix (..., D, D).

    Block power iteration from a fixed start (a cosine basis), far cheaper than an eigendecomposition on small
    batches; any orthonormal result is a valid choice, the leading one is merely the best.
    """
    size = matrix.shape[-1]
    grid = torch.arange(size, dtype=matrix.dtype, device=matrix.device)
    start = torch.cos((grid[:, None] + 0.5) * grid[:rank] * (torch.pi / size))
    basis = start.expand(*matrix.shape[:-2], size, rank)
    for _ in range(SUBSPACE_STEPS):
        basis = torch.linalg.qr(matrix @ basis).Q
    return basis
