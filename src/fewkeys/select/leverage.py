"""Keys with the largest leverage scores (LevAttention)."""

from dataclasses import dataclass

import torch
from torch import Tensor

from fewkeys.core.graph import Columns, Graph
from fewkeys.core.inputs import Inputs
from fewkeys.core.precision import working
from fewkeys.core.rows import marked_places
from fewkeys.core.validation import check_count, check_finite, check_real
from fewkeys.core.work import Work
from fewkeys.select.base import Selector, Sharded, shared_top
from fewkeys.select.causal import OnlineScore, running_top
from fewkeys.sketch.gram import gram64, root64, score_rows
from fewkeys.sketch.leverage import ROUNDING, leverage_scores
from fewkeys.sketch.lewis import sensitivity_bounds
from fewkeys.sketch.sample import centre


@dataclass(frozen=True)
class Leverage(Selector):
    """Keys of large leverage score `k_j^T (K^T K)^+ k_j`, shared by all queries of a head.

    Args:
        count: keep the `count` largest scores, or
        eps: keep every key with score >= eps: the universal set, which under weights `|s|^p` holds every entry >= eps
            of any query.
        centre: subtract the mean key, which cancels in softmax but dominates raw scores. Not with `eps`: centring voids
            the guarantee.
        power: p > 0: scores are the bounds of `leverage_scores(key, p)`, and the universal set has at most
            `rank(K)^max(1, p/2) / eps` keys.

    Cost as `leverage_scores`. Causal with `count` and power 2: scores by the Gram matrix of all keys so far
    (`fewkeys.select.causal`).

    Source: LevAttention (arXiv 2410.05462), sections 2 and 4.
    """

    count: int | None = None
    eps: float | None = None
    centre: bool = False
    power: float = 2.0

    def __post_init__(self) -> None:
        if (self.count is None) == (self.eps is None):
            raise ValueError(f"Leverage: expected exactly one of count and eps, got count={self.count}, eps={self.eps}")
        if self.count is not None:
            check_count("Leverage count", self.count)
        else:
            check_real("Leverage eps", self.eps, above=0.0, below=1.0)
            if self.centre:
                raise ValueError("Leverage: eps is a guarantee for uncentred keys; drop centre=True or give a count")
        check_real("Leverage power", self.power, above=0.0)

    @property
    def causal(self) -> bool:
        return self.eps is None and self.power == 2

    @property
    def sharded(self) -> Sharded:
        return Sharded(score=self._scores, count=self.count, least=self.eps and self.eps * (1 - ROUNDING))

    def _scores(self, inputs: Inputs) -> Tensor:
        """(B, Hkv, N), float64, of this process's keys."""
        rows, totals = working(inputs.key.detach()), inputs.whole.totals
        return sensitivity_bounds(centre(rows, None, totals) if self.centre else rows, self.power, totals)

    def select(self, inputs: Inputs) -> Graph:
        keys = working(inputs.key.detach())
        if self.count is None:
            check_finite(key=keys)
            marked = self._scores(inputs) >= (self.eps or 0.0) * (1 - ROUNDING)
            if inputs.valid is not None:
                marked = marked & inputs.valid[:, None]
            index = marked_places(marked, least=1)
            return Graph(inputs, columns=Columns.shared(index, marked.gather(-1, index), inputs.queries))
        if inputs.is_causal:
            return running_top(inputs, _RunningLeverage(keys, self.centre), self.count)
        if self.centre:
            keys = centre(keys, inputs.valid)
        return shared_top(inputs, leverage_scores(keys, self.power), self.count)

    def covers(self, inputs: Inputs) -> bool:
        return self.count is not None and self.count >= inputs.keys

    def work(self, inputs: Inputs) -> Work:
        # The universal set of rank D has at most D / eps keys.
        kept = inputs.head_dim / self.eps if self.eps is not None else self.count or 0
        return Work(float(kept), 4.0 * inputs.head_dim**2)


class _RunningLeverage(OnlineScore):
    """By the Gram matrix of all keys so far, float64: squares of the largest float32 are finite."""

    def __init__(self, key: Tensor, centre: bool) -> None:
        self.gram = self.total = self.count = key.new_zeros((), dtype=torch.float64)
        self.centre = centre

    def offer(self, key: Tensor, real: Tensor) -> Tensor:
        self.gram = self.gram + gram64(key)
        self.total = self.total + key.sum(-2, keepdim=True, dtype=torch.float64)
        self.count = self.count + real.sum(-1)[:, None, None, None]
        return key.new_zeros(key.shape[:3])

    def score(self, key: Tensor, number: Tensor) -> Tensor:
        rows, gram = key.double(), self.gram
        if self.centre:
            mean = self.total / self.count.clamp_min(1)
            rows, gram = rows - mean, gram - self.count * mean.mT @ mean
        return score_rows(rows, root64(gram, key.dtype)).to(key.dtype)
