"""Scores and universal sets: the keys that have every large entry of attention, for all queries.

**Bounded growth.** The union of `floor(1 / eps)` universal sets for `|s|^p`, each of the keys that the earlier ones
left, has every entry >= eps under every f of bounded growth (proof: docs/levattention.md).
"""

from dataclasses import dataclass, replace
from functools import partial

import torch.distributed as dist
from torch import Tensor

from fewkeys.core.graph import Graph
from fewkeys.core.inputs import Inputs
from fewkeys.core.precision import full_precision, working
from fewkeys.core.totals import Totals
from fewkeys.core.validation import check_real
from fewkeys.core.work import Work
from fewkeys.distributed.communicator import Communicator
from fewkeys.distributed.keys import of_shard
from fewkeys.papers.levattention.lewis import sensitivity_bounds
from fewkeys.select.base import Selector, Sharded
from fewkeys.select.leverage import Leverage, check_limits
from fewkeys.sketch.leverage import ROUNDING, checked, quick_scores


@full_precision()
def leverage_scores(key: Tensor, power: float = 2.0) -> Tensor:
    """Upper bounds on the l_p sensitivity `sup_y |<k_j, y>|^p / sum_l |<k_l, y>|^p` of every key, p = `power`.

    power = 2: the sensitivity itself, the leverage score; the sum per head is r = rank(K). Other powers: Lewis
    weights, sum at most `(1 + 1e-6 max(1, p/2)) r^max(1, p/2)`. Even powers up to 60, while the symmetric tensor powers
    have at most 2500 columns: also their leverage scores, sum at most `C(r + p/2 - 1, p/2)`; the smaller bound counts.
    Proofs: docs/levattention.md.

    Args:
        key: (B, H, N, D), any floating dtype. Duplicates, zero keys (score 0) and any rank deficiency are allowed.
        power: p > 0.

    Returns:
        (B, H, N), in [0, 1], float64 for float64 input, else float32, rounded by up to some percent for power 2.
        Cost O(N D^2) for power 2, O(N D^2) a step (3 to 60 for p from 0.5 to 8) for Lewis weights, O(N m^2) for tensor
        powers of m columns.

    Raises:
        TypeError, ValueError: `key` is not a finite floating tensor of rank 4, `power` is not positive.

    Source: LevAttention (arXiv 2410.05462), section 2; Cohen and Peng (arXiv 1412.0588) for Lewis weights.
    """
    rows = checked("key", key)
    power = check_real("power", power, above=0.0)
    return quick_scores(rows) if power == 2 else sensitivity_bounds(rows, power).to(rows.dtype)


@full_precision()
def universal_set(key: Tensor, eps: float, power: float = 2.0, *, bounded_growth: bool = False) -> Tensor:
    """The keys that have every attention entry >= `eps` under weights `|s|^p`, for every query.

    Args:
        key: (B, H, N, D), any floating dtype.
        eps: the smallest entry that must not be missed, in (0, 1).
        power: p > 0.
        bounded_growth: cover all weights f(s) of growth at most `|s|^p` at once: f even, not decreasing in |s|, and
            `f(s) / |s|^p` not increasing. Huber and Tukey's biweight have p = 2, at any threshold.

    Returns:
        bool (B, H, N), at most `r / eps` keys per head for p <= 2, r = rank(K), `r^(p/2) / eps` for p > 2. Cost as
        `leverage_scores`. With `bounded_growth` at most `1 / eps` times as many keys and as much cost.

    Raises:
        TypeError, ValueError: malformed `key`, `eps` outside (0, 1), or `power` that is not positive.

    Source: LevAttention (arXiv 2410.05462), section 2.
    """
    check_real("eps", eps, above=0.0, below=1.0)
    power = check_real("power", power, above=0.0)
    rows, least = checked("key", key), eps * (1 - ROUNDING)
    marked = sensitivity_bounds(rows, power) >= least
    for _ in range(int(1 / eps * (1 + ROUNDING)) - 1 if bounded_growth else 0):
        others = rows.masked_fill(marked.unsqueeze(-1), 0.0)
        large = sensitivity_bounds(others, power) >= least
        if not bool(large.any()):  # another round would repeat this one
            break
        marked |= large
    return marked


@dataclass(frozen=True)
class Sensitivity(Selector):
    """Keys with a large bound on their l_p sensitivity, that of `leverage_scores(key, power)`.

    Args:
        count: keep the `count` largest, or
        eps: keep every key with a bound >= eps: the universal set, which under weights `Power(power)` holds every entry
            >= eps of any query, at most `rank(K)^max(1, p/2) / eps` keys.
        power: p > 0. For 2 `fewkeys.select.Leverage(count)` is quicker, and causal.

    Cost as `leverage_scores`. Not causal. Source: LevAttention (arXiv 2410.05462), section 2.
    """

    count: int | None = None
    eps: float | None = None
    power: float = 2.0

    def __post_init__(self) -> None:
        check_limits("Sensitivity", self.count, self.eps)
        check_real("Sensitivity power", self.power, above=0.0)

    @property
    def sharded(self) -> Sharded:
        return replace(self._leverage.sharded, score=self._scores)

    @property
    def _leverage(self) -> Leverage:
        return Leverage(self.count, self.eps)

    def _scores(self, inputs: Inputs) -> Tensor:
        return sensitivity_bounds(working(inputs.key.detach()), self.power, inputs.whole.totals)

    def select(self, inputs: Inputs) -> Graph:
        return self.sharded.graph(inputs)

    def covers(self, inputs: Inputs) -> bool:
        return self._leverage.covers(inputs)

    def work(self, inputs: Inputs) -> Work:
        return self._leverage.work(inputs)


def shard_scores(key: Tensor, power: float = 2.0, *, group: dist.ProcessGroup | Communicator | None = None) -> Tensor:
    """`fewkeys.distributed.leverage_scores` for any power p > 0: bounds as `leverage_scores` here.

    Beyond the bytes there, ranks send `8 B H D^2` for each step of Lewis weights, and `8 B H m^2` for m monomials.
    Lewis weights magnify the differences from one process by at most `2 / p` for p <= 2 and `p / 2` for p > 2. Tensor
    powers differ by at most 1e-6.
    """
    rows, bounds = of_shard("shard_scores", key, group, partial(_bounds, power=power), power=power)
    return bounds.to(rows.dtype)


def shard_set(
    key: Tensor, eps: float, power: float = 2.0, *, group: dist.ProcessGroup | Communicator | None = None
) -> Tensor:
    """`fewkeys.distributed.universal_set` for any power: bool (B, H, N_local), as many keys as `universal_set` here."""
    _, bounds = of_shard("shard_set", key, group, partial(_bounds, power=power), power=power, eps=eps)
    return bounds >= eps * (1 - ROUNDING)


def _bounds(rows: Tensor, totals: Totals, power: float) -> Tensor:
    return sensitivity_bounds(rows, power, totals)
