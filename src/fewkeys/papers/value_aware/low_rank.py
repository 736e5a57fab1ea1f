"""The best attention matrix of a given rank, with and without regard to the values."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from fewkeys.core.validation import check_count
from fewkeys.papers.value_aware.value_aware import check_pair


def low_rank(
    weights: Tensor, values: Tensor, rank: int, form: Literal["value-aware", "value-oblivious"] = "value-aware"
) -> Tensor:
    """A matrix of rank at most `rank` in place of the attention weights. Rows need not lie on the simplex.

    "value-oblivious": the truncated SVD of A, `argmin ||A - B||_F` (Eckart, Young, Mirsky). "value-aware":
    `argmin ||A V - B V||_F`. No B of rank k makes `B V` more than a matrix of rank k, so the error is at least that of
    the truncated SVD `A V = P S Q^T`; and `B = P_k P_k^T A` has rank k and `B V` equal to that truncation. From rank
    Dv on, or the rank of V, its error is zero.

    Args:
        weights: (..., Nq, N), rows on the simplex. values: (..., N, Dv), leading dimensions broadcast to weights'.
        rank: at least 1; more than min(Nq, N) changes nothing.
        form: what is minimised.

    Returns:
        (..., Nq, N) in the dtype of weights, computed in float64. Cost O(Nq N min(Nq, N)) for "value-oblivious",
        O(Nq N (Dv + rank)) for "value-aware".

    Raises:
        TypeError, ValueError: malformed or non-finite arguments, rank < 1, unknown form.

    Source: the low-rank reading of Value-aware Approximate Attention (arXiv 2103.09857) is ours.
    """
    check_count("rank", rank)
    if form not in ("value-aware", "value-oblivious"):
        raise ValueError(f"form: expected 'value-aware' or 'value-oblivious', got {form!r}")
    check_pair(weights, values)
    exact = weights.detach().double()
    target = exact @ values.detach().double() if form == "value-aware" else exact
    left = torch.linalg.svd(target, full_matrices=False).U[..., :rank]
    best: Tensor = left @ (left.mT @ exact)
    return best.to(weights.dtype)
