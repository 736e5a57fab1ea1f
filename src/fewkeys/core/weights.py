"""The rules that turn scores into weights: `A_ij = f(s_ij) / sum_l f(s_il)`, except for `Entmax`.

`Entmax` subtracts a threshold that depends on the whole row, so stand-ins cannot enter a sum.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from typing import ClassVar

import torch
from torch import Tensor

from fewkeys.core.catalogue import Listed
from fewkeys.core.entmax import check_alpha, entmax
from fewkeys.core.validation import check_real


class Weights(Listed, ABC):
    """The rule that turns the scores of a row into weights."""

    has_sum: ClassVar[bool] = True
    """Whether weights are f(s) over a sum of f, so that one entry can stand in for several."""

    @abstractmethod
    def kernel(self, parts: Sequence[Tensor]) -> list[Tensor]:
        """The weights of rows whose scores are split over `parts` (..., columns), up to one positive factor per row.

        Hidden entries have score -inf and weight zero. May overwrite scores that carry no gradient.
        """

    def normalised(self, scores: Tensor) -> Tensor:
        """The weights of full rows of scores (..., N); they sum to one, or to zero where f vanishes."""
        (weights,) = self.kernel([scores.clone()])
        return weights / positive(weights.sum(-1, keepdim=True))


def positive(total: Tensor) -> Tensor:
    """`total` with ones for zeros: a divisor for rows without weight."""
    return total.where(total > 0, 1.0)


def _largest(parts: Sequence[Tensor]) -> Tensor:
    """The largest score of every row, without a gradient; 0 where nothing is visible."""
    top = reduce(torch.maximum, (part.detach().amax(-1, keepdim=True) for part in parts))
    return top.masked_fill(top == -math.inf, 0.0)


@dataclass(frozen=True)
class Softmax(Weights):
    """`f(x) = exp(x)`: ordinary attention."""

    def kernel(self, parts: Sequence[Tensor]) -> list[Tensor]:
        top = _largest(parts)
        if any(part.requires_grad for part in parts):
            return [(part - top).exp() for part in parts]
        return [part.sub_(top).exp_() for part in parts]


class _Elementwise(Weights):
    @abstractmethod
    def f(self, scores: Tensor, top: Tensor) -> Tensor:
        """`f` over a factor of the row, so that weights neither overflow nor vanish; 0 for hidden entries (-inf)."""

    def kernel(self, parts: Sequence[Tensor]) -> list[Tensor]:
        top = _largest(parts)
        return [self.f(part, top) for part in parts]


@dataclass(frozen=True)
class Softcap(_Elementwise):
    """`f(x) = exp(cap tanh(x / cap))`: softmax of scores limited to +- cap (Gemma 2, arXiv 2408.00118).

    cap < 80, so that f is within the range of float32.
    """

    cap: float = 50.0

    def __post_init__(self) -> None:
        check_real("cap", self.cap, above=0.0, below=80.0)

    def f(self, scores: Tensor, top: Tensor) -> Tensor:
        capped, largest = (self.cap * (part / self.cap).tanh() for part in (scores, top))
        return (capped - largest).exp().masked_fill(scores == -math.inf, 0.0)


@dataclass(frozen=True)
class Elu(_Elementwise):
    """`f(x) = elu(x) + 1`: positive, exponential on the left and linear on the right."""

    def f(self, scores: Tensor, top: Tensor) -> Tensor:
        # elu(x) + 1 itself would round exp(x) to a multiple of the unit of 1, and to zero from x = -17 on in float32.
        weights = torch.where(scores > 0, scores + 1.0, (scores.clamp_max(0.0) - top.clamp_max(0.0)).exp())
        return weights / top.clamp_min(1.0)


@dataclass(frozen=True)
class Relu(_Elementwise):
    """`f(x) = max(0, x)^p`, p > 0."""

    p: float = 1.0

    def __post_init__(self) -> None:
        check_real("p", self.p, above=0.0)

    def f(self, scores: Tensor, top: Tensor) -> Tensor:
        # x^p has no finite gradient at 0 for p < 1: negative entries are moved to 1 before and to 0 after.
        outside = scores <= 0
        return ((scores / positive(top)).masked_fill(outside, 1.0) ** self.p).masked_fill(outside, 0.0)


@dataclass(frozen=True)
class Power(Weights):
    """`f(x) = |x|^p`, p > 0: the kernel of LevAttention's guarantees (arXiv 2410.05462, section 2)."""

    p: float = 2.0

    def __post_init__(self) -> None:
        check_real("p", self.p, above=0.0)

    def kernel(self, parts: Sequence[Tensor]) -> list[Tensor]:
        return Relu(self.p).kernel([part.abs().masked_fill(part == -math.inf, -math.inf) for part in parts])


@dataclass(frozen=True)
class Entmax(Weights):
    """`A_i = argmax_p <p, s_i> + H_alpha(p)` over the simplex: sparse weights, alpha = 2 is sparsemax.

    `A_ij = max(0, (alpha - 1) s_ij - tau_i)^(1 / (alpha - 1))`, 1 < alpha <= 2 (Peters, Niculae, Martins 2019), beside
    `rest=Drop()` alone.
    """

    alpha: float = 1.5
    has_sum: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_alpha(self.alpha)

    def kernel(self, parts: Sequence[Tensor]) -> list[Tensor]:
        rows = entmax(torch.cat(list(parts), -1), self.alpha)
        return list(rows.split([part.shape[-1] for part in parts], -1))
