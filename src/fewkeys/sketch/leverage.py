"""Leverage scores: how much of a key's direction no other key has.

`score_j = k_j^T (K^T K)^+ k_j = sup_y <k_j, y>^2 / sum_l <k_l, y>^2`, in [0, 1], summing to rank(K). With weights
`|s|^2` no query can give key j more attention than its score, so the keys with `score >= eps` hold every entry >= eps,
for any query (LevAttention, arXiv 2410.05462, section 2).
"""

from __future__ import annotations

import torch
from torch import Tensor

from fewkeys.validation import check_finite, check_real, check_tensor


def working(tensor: Tensor) -> Tensor:
    """`tensor` in the precision of statistics: float64 stays, everything else becomes float32."""
    return tensor if tensor.dtype == torch.float64 else tensor.float()


def gram(rows: Tensor) -> Tensor:
    """`K^T K` (..., D, D) of rows (..., N, D)."""
    return rows.mT @ rows


def whitener(matrix: Tensor) -> Tensor:
    """A square W (..., D, D) with `W W^T = matrix^+`, for symmetric positive semidefinite matrices.

    Cholesky where every matrix of the batch is well conditioned; otherwise the eigenvalues decide the rank in
    float64, with the tolerance `D * eps(input dtype) * largest eigenvalue`.
    """
    size = matrix.shape[-1]
    eps = torch.finfo(matrix.dtype).eps
    factor, info = torch.linalg.cholesky_ex(matrix)
    diagonal = factor.diagonal(dim1=-2, dim2=-1)
    smallest = diagonal.amin(-1) ** 2
    if not bool(((info == 0) & (smallest > 100 * size * eps * diagonal.amax(-1) ** 2)).all()):
        values, vectors = torch.linalg.eigh(matrix.double())
        keep = values > size * eps * values.amax(-1, keepdim=True).clamp_min(torch.finfo(matrix.dtype).tiny)
        inverse = torch.where(keep, values.clamp_min(torch.finfo(values.dtype).tiny).rsqrt(), 0.0)
        root: Tensor = (vectors * inverse.unsqueeze(-2)).to(matrix.dtype)
        return root
    eye = torch.eye(size, dtype=matrix.dtype, device=matrix.device)
    solved: Tensor = torch.linalg.solve_triangular(factor.mT, eye.expand_as(factor), upper=True)
    return solved


def score_rows(rows: Tensor, root: Tensor) -> Tensor:
    """`k^T W W^T k` (..., N) for rows (..., N, D) and a whitener W (..., D, D), at most 1."""
    return (rows @ root).square().sum(-1).clamp_max(1.0)


def leverage_scores(key: Tensor) -> Tensor:
    """Leverage score of every key.

    Args:
        key: (B, H, N, D), any floating dtype. Duplicates, zero keys (score 0), fewer keys than dimensions and any
            rank deficiency are allowed.

    Returns:
        (B, H, N), float64 for float64 input and float32 otherwise; sums to the rank per head. Cost O(N D^2).

    Raises:
        TypeError, ValueError: `key` is not a finite floating tensor of rank 4.
    """
    rows = working(check_tensor("key", key)).detach()
    check_finite(key=rows)
    return score_rows(rows, whitener(gram(rows)))


def universal_set(key: Tensor, eps: float) -> Tensor:
    """The keys that hold every attention entry >= `eps` under weights `|s|^2`, for every possible query.

    Args:
        key: (B, H, N, D), any floating dtype.
        eps: the smallest entry that must not be missed, in (0, 1).

    Returns:
        bool (B, H, N); at most `rank(K) / eps` keys per head are marked. Cost O(N D^2).

    Raises:
        TypeError, ValueError: malformed `key`, or `eps` outside (0, 1).

    Source: LevAttention (arXiv 2410.05462), section 2.
    """
    check_real("eps", eps, above=0.0, below=1.0)
    scores = leverage_scores(key)
    # Rounding must not drop a key that sits exactly at eps: the set may only grow.
    return scores >= eps * (1 - 64 * torch.finfo(scores.dtype).eps)
