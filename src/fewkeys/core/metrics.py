"""Measures of edges and outputs. Masks are bool (..., Nq, Nk), True for an edge: `gold` the correct ones, `predicted`
those of a method.
"""

import torch
from torch import Tensor
from torch.linalg import vector_norm

from fewkeys.core.precision import working_dtype
from fewkeys.core.validation import describe


def recall(predicted: Tensor, gold: Tensor) -> Tensor:
    """`|gold and predicted| / |gold|` per head (...): the share of gold edges that are kept; 1 without gold edges."""
    _check_masks(predicted, gold)
    total, kept = gold.sum((-2, -1)), (gold & predicted).sum((-2, -1))
    return torch.where(total > 0, kept.float() / total.clamp_min(1), 1.0)


def sparsity(mask: Tensor) -> Tensor:
    """`1 - |edges| / (Nq Nk)` per head (...)."""
    _check_mask("mask", mask)
    return 1.0 - mask.float().mean((-2, -1))


def exact_fraction(predicted: Tensor, gold: Tensor) -> Tensor:
    """The share of queries all of whose gold edges are kept, per head (...). Sparse attention is exact for these."""
    _check_masks(predicted, gold)
    return (predicted | ~gold).all(-1).float().mean(-1)


def mass(weights: Tensor, mask: Tensor) -> Tensor:
    """The attention weight that lies on edges of `mask`, per query: weights (..., Nq, Nk) -> (..., Nq)."""
    _check_mask("mask", mask)
    if not isinstance(weights, Tensor) or weights.shape[-2:] != mask.shape[-2:]:
        raise ValueError(
            f"weights: expected (..., {mask.shape[-2]}, {mask.shape[-1]}) like mask, got {describe(weights)}"
        )
    return (weights * mask).sum(-1)


def relative_error(approx: Tensor, exact: Tensor) -> Tensor:
    """`|approx_i - exact_i| / |exact_i|` per query: (..., N, Dv) -> (..., N). Zero where both are zero."""
    if not isinstance(approx, Tensor) or not isinstance(exact, Tensor) or approx.shape != exact.shape:
        raise ValueError(f"approx: expected a tensor shaped like exact, {describe(exact)}, got {describe(approx)}")
    dtype = working_dtype(exact.dtype)
    approx, exact = approx.double(), exact.double()  # squares neither overflow nor vanish
    difference, size = vector_norm(approx - exact, dim=-1), vector_norm(exact, dim=-1)
    # Not `difference > 0`: a NaN output must give a NaN error, not zero.
    return torch.where(difference == 0, torch.zeros_like(size), difference / size).to(dtype)


def output_error(approx: Tensor, exact: Tensor) -> float:
    """The mean relative error of attention outputs over all queries, heads and sequences."""
    return float(relative_error(approx, exact).mean())


def _check_mask(name: str, mask: object) -> None:
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool or mask.ndim < 2:
        raise ValueError(f"{name}: expected a bool mask (..., queries, keys), got {describe(mask)}")


def _check_masks(predicted: Tensor, gold: Tensor) -> None:
    _check_mask("predicted", predicted)
    _check_mask("gold", gold)
    if predicted.shape != gold.shape:
        raise ValueError(f"predicted: expected the shape of gold, {describe(gold)}, got {describe(predicted)}")
