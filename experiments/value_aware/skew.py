"""How unequal attention weights are: where few keys hold all the weight, few keys suffice whatever the values.

Each measure takes weights (..., N) with rows on the simplex and returns (...) in float32 or better. Rows of zeros have
no weights, and a skew of NaN: nothing said about them would be true.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fewkeys.core.precision import working
from fewkeys.core.validation import check_count, check_finite


def top_mass(weights: Tensor, r: int) -> Tensor:
    """The weight of the r largest entries, `sum_{j in top r} a_j`, in [r / N, 1]. Cost O(N log r) per row."""
    check_count("r", r)
    shares = _shares(weights)
    return shares.topk(min(r, shares.shape[-1]), -1).values.sum(-1)


def entropy(weights: Tensor) -> Tensor:
    """`-sum_j a_j log a_j` in nats, from 0 (one key) to log N (all alike); its exponential counts the keys in use."""
    terms: Tensor = torch.special.entr(_shares(weights))
    return terms.sum(-1)


def gini(weights: Tensor) -> Tensor:
    """`sum_ij |a_i - a_j| / (2 N)`, from 0 (all alike) to 1 - 1 / N (one key). Cost O(N log N) per row.

    With entries sorted upwards the double sum is `2 sum_i (2 i - N - 1) a_i`, i from 1.
    """
    shares = _shares(weights).sort(-1).values
    count = shares.shape[-1]
    factor = torch.arange(1 - count, count, 2, dtype=shares.dtype, device=shares.device) / count
    return (shares * factor).sum(-1)


def _shares(weights: object) -> Tensor:
    """Rows divided by their sums, so that a measure does not see the rounding of a low precision."""
    if not isinstance(weights, Tensor) or not weights.is_floating_point():
        got = weights.dtype if isinstance(weights, Tensor) else type(weights).__name__
        raise TypeError(f"weights: expected a floating tensor (..., N), got {got}")
    if weights.ndim < 1 or weights.shape[-1] == 0:
        raise ValueError(f"weights: expected a last dimension of at least one key, got shape {tuple(weights.shape)}")
    check_finite(weights=weights)
    if bool((weights < 0).any()):
        raise ValueError(
            f"weights: expected no negative entries, got {float(weights.min()):.3g}; normalise the scores first"
        )
    shares = working(weights.detach())
    return shares / shares.sum(-1, keepdim=True)
