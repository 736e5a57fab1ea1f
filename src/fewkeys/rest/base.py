"""The base of all rests, and the stand-ins that they make."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import torch
from torch import Tensor

from fewkeys.core.catalogue import Listed
from fewkeys.core.fields import Fields
from fewkeys.core.graph import Graph
from fewkeys.core.inputs import Inputs
from fewkeys.core.precision import working_dtype
from fewkeys.core.validation import check_count
from fewkeys.core.weights import Weights
from fewkeys.core.work import Work
from fewkeys.select.base import Selector
from fewkeys.sketch.codes import BLOCK
from fewkeys.sketch.sums import members


@dataclass(frozen=True, eq=False)
class StandIns(Fields):
    """C stand-ins per key head that represent the keys a query does not keep.

    For a scaled query q, stand-in c has the score `s_c = q . key_c + bias_c + q^T curvature q / 2` and the weight
    `n_c f(s_c)`, where `n_c = sum_{j: label_j = c} share_j` is over the keys j that the query does not keep. Its value
    is `value_c`, plus the first-order term `factor_c u right`, `u = min(max(q left - middle, -reach), reach)`.

    Shapes: key (B, Hkv, C, D), value (B, Hkv, C, Dv), bias and factor (B, Hkv, C), curvature (B, Hkv, D, D), left
    (B, Hkv, D, r), right (B, Hkv, r, Dv) or None (identity), bounds (B, Hkv, 2, r): middle and reach; label, int64, and
    share (B, Hkv, Nk), zero for keys that all queries keep and for padding. Labels, shares, bounds have no gradient.
    """

    key: Tensor
    value: Tensor
    label: Tensor
    share: Tensor
    bias: Tensor | None = None
    left: Tensor | None = None
    right: Tensor | None = None
    factor: Tensor | None = None
    curvature: Tensor | None = None
    bounds: Tensor | None = None

    @property
    def count(self) -> int:
        return self.key.shape[2]

    @cached_property
    def member(self) -> Tensor:
        """(B, Hkv, Nk, C): the shares, each in the column of its label."""
        return members(self.label, self.share, self.count)

    @cached_property
    def total(self) -> Tensor:
        """(B, Hkv, C): the sum of the shares of each stand-in."""
        return self.share.new_zeros(self.key.shape[:3]).scatter_add_(-1, self.label, self.share)


@dataclass(frozen=True, eq=False)
class CohortStandIns(Fields):
    """C stand-ins for each of H cohorts of queries, over clusters of keys that all cohorts share.

    For a scaled query q of cohort h, stand-in c has the score `q . key_hc + bias_hc` and the weight `n_c exp(score)`,

        n_c = mass_hc (keys of cluster c that the query does not keep) / size_hc,

    where size_hc counts the keys of the cluster outside the cohort's list: each neighbour that a query keeps besides
    takes an equal part. Under a bias of distances a key counts exp(bias) times.

    All else is as in `StandIns`, with the cohorts as a third dimension of all tensors but label; mass and size have the
    shape of bias. Gradients flow through key, value and left.
    """

    key: Tensor
    value: Tensor
    bias: Tensor
    mass: Tensor
    size: Tensor
    label: Tensor
    left: Tensor | None = None
    right: Tensor | None = None
    factor: Tensor | None = None
    bounds: Tensor | None = None

    @property
    def count(self) -> int:
        return self.key.shape[3]


@dataclass(frozen=True, eq=False)
class BlockStandIns(Fields):
    """M stand-ins per key head and block of queries (of the graph's columns): a summary of the past of each block.

    Shapes: key (B, Hkv, blocks, M, D), value (B, Hkv, blocks, M, Dv), bias (B, Hkv, blocks, M), -inf at places without
    a stand-in, size (B, Hkv, blocks, M): the number of keys. Weights are `f(score)` times the size, under `Softmax`
    `exp(score + bias)`.
    """

    key: Tensor
    value: Tensor
    bias: Tensor
    size: Tensor


@dataclass(frozen=True, eq=False)
class RangeStandIns(Fields):
    """The means of M ranges of keys for every step of queries, a block of 32 positions or all queries.

    `totals` (B, Hkv, G + 1, D + Dv), float64: sums of the keys and values before each block of 32, and of all; `reals`
    (B, G + 1), float64: likewise numbers of real keys, None: all; `edges` (steps, M + 1), int64: range c holds the keys
    edges_c .. edges_(c+1) - 1, whole blocks. Hence key (B, Hkv, steps, M, D), value (B, Hkv, steps, M, Dv) and size
    (B, steps, M), the number of real keys. Weights are `f(score)` times the size, less the keys that the query keeps.
    """

    totals: Tensor
    reals: Tensor | None
    edges: Tensor
    head_dim: int
    dtype: torch.dtype

    @property
    def count(self) -> int:
        return self.edges.shape[1] - 1

    @cached_property
    def size(self) -> Tensor:
        if self.reals is None:
            return self.edges.diff(dim=-1).to(self.dtype).expand(len(self.totals), -1, -1)
        return self.reals[:, -(-self.edges // BLOCK)].diff(dim=-1).to(self.dtype)

    @cached_property
    def mean(self) -> Tensor:
        """(B, Hkv, steps, M, D + Dv)."""
        # Differences of prefix sums: float32 would lose their digits.
        total = self.totals[:, :, -(-self.edges // BLOCK)].diff(dim=-2)
        return (total / self.size.clamp_min(1)[:, None, :, :, None]).to(self.dtype)

    @property
    def key(self) -> Tensor:
        return self.mean[..., : self.head_dim]

    @property
    def value(self) -> Tensor:
        return self.mean[..., self.head_dim :]

    def step(self, inputs: Inputs, start: int, stop: int) -> Tensor:
        """The step of each of the queries start .. stop - 1."""
        position = torch.arange(start, stop, device=self.edges.device) + inputs.offset % BLOCK
        return position // BLOCK if len(self.edges) > 1 else torch.zeros_like(position)

    def remaining(self, step: int, size: Tensor, index: Tensor) -> Tensor:
        """The `size` (..., M) of the ranges of a step, less the keys at `index` (..., K); -1 for none."""
        # Ranges may be empty: a key is in the last one that begins at it or before it.
        place = torch.searchsorted(self.edges[step], index.clamp_min(0), right=True) - 1
        kept = size.new_zeros((*index.shape[:-1], self.count))
        return size - kept.scatter_add_(-1, place.clamp_max(self.count - 1), (index >= 0).to(size.dtype))


AnyStandIns = StandIns | CohortStandIns | BlockStandIns | RangeStandIns


class Rest(Listed, ABC):
    """A rule that makes the stand-ins for the keys that are not kept. What is not abstract has a safe default."""

    causal: ClassVar[bool] = False
    """Whether the stand-ins see only the past under `is_causal=True`."""
    needs_causal: ClassVar[bool] = False
    """Whether the stand-ins have no meaning without `is_causal=True`."""

    @abstractmethod
    def prepare(self, inputs: Inputs, graph: Graph, weights: Weights) -> AnyStandIns | None:
        """The stand-ins for all keys outside the graph's shared columns; None: nothing stands in."""

    @abstractmethod
    def slots(self, head_dim: int, value_dim: int) -> float:
        """What a query pays for the stand-ins, in units of one key: 2 (D + Dv) operations."""

    @abstractmethod
    def work(self, inputs: Inputs, keep: Selector) -> Work:
        """The cost of summarising and of the stand-ins beside `keep`."""

    @property
    def running(self) -> int | None:
        """How many stand-ins a stream keeps for all evicted keys; None: the rule must see every key."""
        return None

    @property
    def clusters(self) -> int:
        """The number of clusters that the rule reads, which plans with the same number share."""
        return 0

    def check_beside(self, keep: Selector) -> None:
        """Raise `ValueError` where the stand-ins cannot be made beside `keep`; by default beside lists of cohorts."""
        if keep.cohort_lists > 1:
            raise ValueError(
                f"keep: {type(self).__name__} has no stand-ins for cohorts of queries, got {keep}; use "
                f"ClusterMeans(cohorts={keep.cohort_lists}), Drop(), or cohorts=1 there"
            )

    def check(self, weights: Weights) -> None:
        """Raise `ValueError` where the stand-ins have no meaning under `weights`."""
        if not weights.has_sum:
            raise ValueError(
                f"rest: {type(self).__name__} needs weights that are f(score) over a sum, which "
                f"{type(weights).__name__} is not (its threshold depends on every score); use rest=Drop() or Softmax()"
            )


@dataclass(frozen=True)
class Drop(Rest):
    """Nothing stands in: the weights are renormalised over the kept keys."""

    causal: ClassVar[bool] = True

    def prepare(self, inputs: Inputs, graph: Graph, weights: Weights) -> StandIns | None:
        return None

    def slots(self, head_dim: int, value_dim: int) -> float:
        return 0.0

    def work(self, inputs: Inputs, keep: Selector) -> Work:
        return Work(0.0)

    @property
    def running(self) -> int:
        return 0

    def check_beside(self, keep: Selector) -> None:
        return None

    def check(self, weights: Weights) -> None:
        return None


@dataclass(frozen=True)
class CountedRest(Rest, ABC, listed=False):
    """A rule that makes `count` stand-ins."""

    count: int

    def __post_init__(self) -> None:
        check_count(f"{type(self).__name__} count", self.count)

    def slots(self, head_dim: int, value_dim: int) -> float:
        return float(self.count)


def unkept(inputs: Inputs, graph: Graph) -> Tensor:
    """(B, Hkv, Nk), 1 for real keys that no shared column keeps and 0 elsewhere, in working precision."""
    dtype = working_dtype(inputs.key.dtype)
    if graph.hidden is None:
        return inputs.key.new_ones((inputs.batch, inputs.kv_heads, inputs.keys), dtype=dtype)
    return (graph.hidden == 0).to(dtype)


def value_shift(query: Tensor, left: Tensor, right: Tensor | None, bounds: Tensor | None) -> Tensor:
    """`u_i right` (..., M, Dv) of `StandIns` for queries (..., M, D): the first-order term before the factors.

    u has the size of the values, whatever the scores: no precision is lost by cancellation.
    """
    along = query @ left
    if bounds is not None:
        middle, reach = (part.unsqueeze(-2) for part in bounds.unbind(-2))
        along = (along - middle).clamp(-reach, reach)
    return along if right is None else along @ right
