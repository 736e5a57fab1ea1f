"""The base of rests, and the stand-ins that they make."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import torch
from torch import Tensor

from fewkeys.core.catalogue import Listed
from fewkeys.core.fields import Fields
from fewkeys.core.graph import Graph, marked
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
    """C stand-ins for the keys that a query does not keep: the same for all queries (H = 1), or of each of H cohorts.

    For a scaled query q of cohort h, stand-in c has the score `s_c = q . key_hc + bias_hc` and the weight
    `n_c f(s_c)`,

        n_c = mass_hc (keys j of label_j = c that the query does not keep) / size_hc,

    where size_hc counts the keys of c outside the cohort's list: each further key that a query keeps takes an equal
    part. Under a bias of distances a key counts exp(bias) times. The value is `value_hc`, plus the first-order term
    `factor_hc u right_h`, `u = min(max(q left_h - middle, -reach), reach)`.

    Shapes: key (B, Hkv, H, C, D), value (B, Hkv, H, C, Dv), mass, size, bias and factor (B, Hkv, H, C), left
    (B, Hkv, H, D, r), right (B, Hkv, H, r, Dv), bounds (B, Hkv, H, 2, r): middle and reach; label (B, Hkv, Nk), int64.
    Gradients flow through key, value, left, right and bias.
    """

    key: Tensor
    value: Tensor
    mass: Tensor
    size: Tensor
    label: Tensor
    bias: Tensor | None = None
    left: Tensor | None = None
    right: Tensor | None = None
    factor: Tensor | None = None
    bounds: Tensor | None = None

    @property
    def count(self) -> int:
        return self.key.shape[3]

    @property
    def first_order(self) -> tuple[Tensor, Tensor, Tensor, Tensor] | None:
        """left, right, bounds and factor, if there is a first-order term."""
        if self.left is None or self.right is None or self.bounds is None or self.factor is None:
            return None
        return self.left, self.right, self.bounds, self.factor

    def member(self, unkept: Tensor) -> Tensor:
        """(B, Hkv, Nk, C), H = 1: what each of the `unkept` keys counts for."""
        part = (self.mass / self.size.clamp_min(1)).squeeze(2).gather(-1, self.label)
        return members(self.label, unkept * part, self.count)


@dataclass(frozen=True, eq=False)
class BlockStandIns(Fields):
    """M stand-ins for the past of each block of queries (of the graph's columns).

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
        """The `size` (..., M) of a step, less the keys at `index` (..., K), -1 for none."""
        # Ranges may be empty: a key is in the last one that begins at it or before it.
        place = torch.searchsorted(self.edges[step], index.clamp_min(0), right=True) - 1
        kept = size.new_zeros((*index.shape[:-1], self.count))
        return size - kept.scatter_add_(-1, place.clamp_max(self.count - 1), (index >= 0).to(size.dtype))


AnyStandIns = StandIns | BlockStandIns | RangeStandIns


class Rest(Listed, ABC):
    """A rule that makes stand-ins for the keys that are not kept. What is not abstract has a safe default."""

    causal: ClassVar[bool] = False
    """Whether the stand-ins see only the past under `is_causal=True`."""
    needs_causal: ClassVar[bool] = False
    """Whether the stand-ins have no meaning without `is_causal=True`."""

    @abstractmethod
    def prepare(self, inputs: Inputs, graph: Graph, weights: Weights) -> AnyStandIns | None:
        """Stand-ins for all keys outside the graph's shared columns; None: there are none."""

    @abstractmethod
    def slots(self, head_dim: int, value_dim: int) -> float:
        """What the stand-ins cost a query, in units of a key: 2 (D + Dv) operations."""

    @abstractmethod
    def work(self, inputs: Inputs, keep: Selector) -> Work:
        """The cost of making the stand-ins and of attending to them, beside `keep`."""

    @property
    def running(self) -> int | None:
        """How many stand-ins a stream holds for all evicted keys; None: the rule must see every key."""
        return None

    @property
    def clusters(self) -> int:
        """The number of clusters; plans with the same number share them."""
        return 0

    def check_beside(self, keep: Selector) -> None:
        """Raise `ValueError` where they cannot be made beside `keep`; by default beside lists of cohorts, and beside
        scans, each query of which would have to count the keys that it keeps of every stand-in.
        """
        name = type(self).__name__
        if keep.cohort_lists > 1:
            fix = f"use ClusterMeans(cohorts={keep.cohort_lists}), Drop(), or cohorts=1 there"
            raise ValueError(f"keep: {name} has no stand-ins for cohorts of queries, got {keep}; {fix}")
        if keep.scanned:
            fix = "use BlockMeans beside KeyScan alone, or Drop()"
            raise ValueError(f"keep: {name} has no stand-ins for what a KeyScan leaves, got {keep}; {fix}")

    def check(self, weights: Weights) -> None:
        """Raise `ValueError` where they have no meaning under `weights`."""
        if not weights.has_sum:
            raise ValueError(
                f"rest: {type(self).__name__} needs weights that are f(score) over a sum, got {weights}, whose "
                "threshold depends on every score; use rest=Drop() or Softmax()"
            )


@dataclass(frozen=True)
class Drop(Rest):
    """Nothing stands in: the weights are renormalised over the kept keys."""

    causal: ClassVar[bool] = True
    running = 0

    def prepare(self, inputs: Inputs, graph: Graph, weights: Weights) -> StandIns | None:
        return None

    def slots(self, head_dim: int, value_dim: int) -> float:
        return 0.0

    def work(self, inputs: Inputs, keep: Selector) -> Work:
        return Work(0.0)

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
    """(B, Hkv, Nk): 1 for real keys outside the list that all queries share, else 0, in working precision."""
    x, shared = inputs, graph.shared
    free = x.key.new_ones((x.batch, x.kv_heads, x.keys), dtype=torch.bool)
    if shared is not None:
        free = marked(shared.index.squeeze(2), shared.used.squeeze(2), x.keys) == 0
    free = free if x.valid is None else free & x.valid[:, None]
    return free.to(working_dtype(x.key.dtype))


def value_shift(query: Tensor, left: Tensor, right: Tensor, bounds: Tensor) -> Tensor:
    """`u right` (..., M, Dv) of `StandIns` for queries (..., M, D).

    u has the size of the values, whatever the scores: no precision is lost by cancellation.
    """
    middle, reach = (part.unsqueeze(-2) for part in bounds.unbind(-2))
    return (query @ left - middle).clamp(-reach, reach) @ right
