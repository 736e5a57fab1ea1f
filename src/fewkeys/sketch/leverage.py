"""Leverage scores: how much of a key's direction no other key has.

`score_j = k_j^T (K^T K)^+ k_j = sup_y <k_j, y>^2 / sum_l <k_l, y>^2`. With weights `|s|^2` no query can give key j more
attention, so the keys with `score >= eps` hold every entry >= eps, for any query. The same holds for weights `|s|^p`
and the l_p sensitivities, which lewis.py bounds.
"""

import torch
from torch import Tensor

from fewkeys.core.precision import full_precision, working
from fewkeys.core.validation import check_finite, check_real, check_tensor
from fewkeys.sketch.gram import cholesky_whitener, gram, score_rows
from fewkeys.sketch.lewis import sensitivity_bounds

ROUNDING = 1e-9
"""float64 scores count from `eps * (1 - ROUNDING)` on: rounding cannot drop a key at eps."""


def checked(name: str, keys: object) -> Tensor:
    """Finite keys (B, H, N, D) in working precision, without gradient."""
    rows = working(check_tensor(name, keys)).detach()
    check_finite(**{name: rows})
    return rows


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
    root = None if power != 2 or rows.dtype == torch.float64 else cholesky_whitener(gram(rows))
    if root is None:
        # float32 would treat directions below 1/400 of the strongest as absent.
        return sensitivity_bounds(rows, power).to(rows.dtype)
    return score_rows(rows, root)
