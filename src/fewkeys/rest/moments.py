"""One Gaussian for all the keys that are not kept."""

from dataclasses import dataclass

import torch

from fewkeys.core.derivatives import constants
from fewkeys.core.graph import Graph
from fewkeys.core.inputs import Inputs
from fewkeys.core.precision import working
from fewkeys.core.weights import Softmax, Weights
from fewkeys.core.work import Work
from fewkeys.rest.base import Rest, StandIns, unkept
from fewkeys.select.base import Selector

REACH = 1.0
"""The reach of the first-order term in each coordinate, in standard deviations of the values."""


@dataclass(frozen=True)
class Moments(Rest):
    """The keys and values that are not kept, taken as jointly Gaussian with their own mean and covariance.

    `sum_j exp(q . k_j) v_j = n exp(q . mu + q^T C q / 2) (nu + S^T q)` with q scaled, mu, C the mean and covariance of
    the keys, nu the mean value, S the covariance of keys and values, n the number of keys the query does not keep.
    In each coordinate S^T q stays within `REACH` standard deviations of the unkept values, so the output is at most
    `2 max |v|`.

    `Softmax` only. Slots: 1 for the mean, `D^2 / (D + Dv)` for the quadratic form and `D Dv / (D + Dv)` for S: D + 1.
    Cost O(n D (D + Dv)) once, O(D (D + Dv)) per query. Gradients flow through the moments. Not causal.
    """

    def check(self, weights: Weights) -> None:
        super().check(weights)
        if not isinstance(weights, Softmax):
            raise ValueError(f"rest: Moments() is the Gaussian integral of exp and needs Softmax(), got {weights}")

    def slots(self, head_dim: int, value_dim: int) -> float:
        return 1.0 + head_dim

    def work(self, inputs: Inputs, keep: Selector) -> Work:
        return Work(1.0 + inputs.head_dim, 2.0 * inputs.head_dim * (inputs.head_dim + inputs.value_dim))

    def prepare(self, inputs: Inputs, graph: Graph, weights: Weights) -> StandIns:
        key, value, free = working(inputs.key), working(inputs.value), unkept(inputs, graph)
        member = free.unsqueeze(-1)
        count = member.sum(-2, keepdim=True).clamp_min(1)
        mean_key, mean_value = member.mT @ key / count, member.mT @ value / count
        spread, value_spread = (key - mean_key) * member, value - mean_value
        with constants():
            reach = REACH * ((value_spread * member).square().sum(-2, keepdim=True) / count).sqrt()
        tensors = {
            "key": mean_key,
            "value": mean_value,
            "mass": member.sum(-2),
            "size": member.sum(-2),
            "left": spread.mT @ value_spread / count,
            "factor": member.new_ones((inputs.batch, inputs.kv_heads, 1)),
            "curvature": spread.mT @ spread / count,
            "bounds": torch.cat([torch.zeros_like(reach), reach], 2),
        }
        label = torch.zeros_like(free, dtype=torch.int64)
        return StandIns(label=label, **{name: part.unsqueeze(2) for name, part in tensors.items()})
