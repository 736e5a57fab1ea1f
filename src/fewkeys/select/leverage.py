"""Keys with the largest leverage scores (LevAttention)."""

from dataclasses import dataclass

import torch
from torch import Tensor

from fewkeys.core.graph import Graph
from fewkeys.core.inputs import Inputs
from fewkeys.core.precision import working
from fewkeys.core.validation import check_count, check_real
from fewkeys.core.work import Work
from fewkeys.select.base import Selector, Sharded
from fewkeys.select.causal import running_top
from fewkeys.sketch.gram import gram64, root64, score_rows
from fewkeys.sketch.leverage import ROUNDING, leverage_bounds, quick_scores
from fewkeys.sketch.sample import centre


@dataclass(frozen=True)
class Leverage(Selector):
    """Keys of large leverage score `k_j^T (K^T K)^+ k_j`, shared by all queries of a head.

    Args:
        count: keep the `count` largest scores, or
        eps: keep every key with score >= eps: the universal set, at most `rank(K) / eps` keys, which under weights
            `|s|^2` holds every entry >= eps of any query.
        centre: subtract the mean key, which cancels in softmax but dominates raw scores. Not with `eps`: centring voids
            the guarantee.

    Cost O(n D^2). Causal with `count`: scores by the Gram matrix of all keys so far (`fewkeys.select.causal`). Other
    weights `|s|^p`: `fewkeys.papers.levattention.Sensitivity`.

    Source: LevAttention (arXiv 2410.05462), sections 2 and 4.
    """

    count: int | None = None
    eps: float | None = None
    centre: bool = False

    def __post_init__(self) -> None:
        check_limits("Leverage", self.count, self.eps)
        if self.centre and self.eps is not None:
            raise ValueError("Leverage: eps is a guarantee for uncentred keys; drop centre=True or give a count")

    @property
    def causal(self) -> bool:
        return self.eps is None

    @property
    def sharded(self) -> Sharded:
        return Sharded(self._scores, self.count, (self.eps or 0.0) * (1 - ROUNDING))

    def _scores(self, inputs: Inputs) -> Tensor:
        rows, totals = working(inputs.key.detach()), inputs.whole.totals
        if self.centre:
            rows = centre(rows, inputs.valid, totals)
        return leverage_bounds(rows, totals) if self.eps or inputs.shard else quick_scores(rows)

    def select(self, inputs: Inputs) -> Graph:
        if inputs.is_causal and self.count is not None:
            running = _RunningLeverage(working(inputs.key.detach()), self.centre)
            return running_top(inputs, self.count, running.score, running.offer)
        return self.sharded.graph(inputs)

    def covers(self, inputs: Inputs) -> bool:
        return self.count is not None and self.count >= inputs.keys

    def work(self, inputs: Inputs) -> Work:
        # The universal set of rank D has at most D / eps keys.
        kept = inputs.head_dim / self.eps if self.eps is not None else self.count or 0
        return Work(float(kept), 4.0 * inputs.head_dim**2)


def check_limits(name: str, count: int | None, eps: float | None) -> None:
    """Raise `TypeError` or `ValueError` unless exactly one is given, and is within its limits."""
    if (count is None) == (eps is None):
        raise ValueError(f"{name}: expected exactly one of count and eps, got count={count}, eps={eps}")
    if count is not None:
        check_count(f"{name} count", count)
    else:
        check_real(f"{name} eps", eps, above=0.0, below=1.0)


class _RunningLeverage:
    """By the Gram matrix of all keys so far, float64: squares of the largest float32 are finite."""

    def __init__(self, key: Tensor, centre: bool) -> None:
        self.gram = self.total = self.count = key.new_zeros((), dtype=torch.float64)
        self.centre = centre

    def offer(self, key: Tensor, real: Tensor) -> None:
        self.gram = self.gram + gram64(key)
        self.total = self.total + key.sum(-2, keepdim=True, dtype=torch.float64)
        self.count = self.count + real.sum(-1)[:, None, None, None]

    def score(self, key: Tensor, index: Tensor) -> Tensor:
        rows, gram = key.double(), self.gram
        if self.centre:
            mean = self.total / self.count.clamp_min(1)
            rows, gram = rows - mean, gram - self.count * mean.mT @ mean
        return score_rows(rows, root64(gram, key.dtype)).to(key.dtype)
