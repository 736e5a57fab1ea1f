"""Universal sets: the keys that have every large entry of attention, for all queries.

**Bounded growth.** The union of `floor(1 / eps)` universal sets for `|s|^p`, each of the keys that the earlier ones
left, has every entry >= eps under every f of bounded growth (proof: docs/levattention.md).
"""

from torch import Tensor

from fewkeys.core.precision import full_precision
from fewkeys.core.validation import check_real
from fewkeys.sketch.leverage import ROUNDING, checked
from fewkeys.sketch.lewis import sensitivity_bounds


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
