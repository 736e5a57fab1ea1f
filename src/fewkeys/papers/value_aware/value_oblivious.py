"""The r weights per row that are best without knowledge of the values."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from fewkeys.core.validation import check_count


def value_oblivious(weights: Tensor, r: int, form: Literal["renormalised", "projected"] = "renormalised") -> Tensor:
    """The r largest weights of every row, put back on the simplex.

    "renormalised": `b_j = a_j / sum_S a`, which keeps proportions. "projected": `b_j = a_j + (1 - sum_S a) / |S|`, the
    Euclidean projection onto the simplex over S, which is the l2-best approximation of the row with at most r entries.

    Args:
        weights: (..., N), non-negative rows that sum to one (attention weights).
        r: largest number of nonzeros per row, at least 1.
        form: how the kept weights replace the dropped mass.

    Returns:
        (..., N) with at most r nonzeros per row; rows sum to one (rows of zeros stay zero). Cost O(N log r) per row.

    Raises:
        TypeError, ValueError: malformed weights, r < 1, unknown form.

    Source: Value-aware Approximate Attention (arXiv 2103.09857), section 3.
    """
    check_count("r", r)
    if not isinstance(weights, Tensor) or not weights.is_floating_point() or weights.ndim < 1:
        raise TypeError(f"weights: expected a floating tensor (..., N), got {type(weights).__name__}")
    if form not in ("renormalised", "projected"):
        raise ValueError(f"form: expected 'renormalised' or 'projected', got {form!r}")
    top = weights.topk(min(r, weights.shape[-1]), -1)
    values = top.values
    total = values.sum(-1, keepdim=True)
    if form == "renormalised":
        values = values / torch.where(total > 0, total, torch.ones_like(total))
    else:
        chosen = values > 0
        rest = (1 - total) / chosen.sum(-1, keepdim=True).clamp_min(1)
        values = torch.where(chosen, values + rest, values)
    return torch.zeros_like(weights).scatter(-1, top.indices, values)
