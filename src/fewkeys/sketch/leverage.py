"""Leverage scores: how much of a key's direction no other key has.

`score_j = k_j^T (K^T K)^+ k_j = sup_y <k_j, y>^2 / sum_l <k_l, y>^2`. With weights `|s|^2` no query can give key j more
attention, so the keys with `score >= eps` hold every entry >= eps, for any query. `fewkeys.papers.levattention` has the
scores for other weights `|s|^p`.

Directions in which the keys are below their own rounding count as absent (`root64`). If keys are distributed, each
process computes the scores of its keys, possibly none.
"""

import torch
from torch import Tensor

from fewkeys.core.precision import full_precision, working
from fewkeys.core.totals import WHOLE, Totals, row_maximum
from fewkeys.core.validation import check_finite, check_tensor
from fewkeys.sketch.gram import cholesky_whitener, gram64, inverse_of, power_of_two, root64, score_rows

ROUNDING = 1e-9
"""float64 scores count from `eps * (1 - ROUNDING)` on: rounding cannot drop a key at eps."""


def checked(name: str, keys: object) -> Tensor:
    """Finite keys (B, H, N, D) in working precision, without gradient."""
    rows = working(check_tensor(name, keys)).detach()
    check_finite(**{name: rows})
    return rows


@full_precision()
def leverage_scores(key: Tensor) -> Tensor:
    """The leverage scores (B, H, N), in [0, 1], of keys (B, H, N, D) of any floating dtype; zero for zero keys.

    The sum per head is rank(K). float64 for float64 input, else float32, rounded by up to some percent. Cost O(N D^2).
    `TypeError`, `ValueError`: `key` is not a finite floating tensor of rank 4.

    Source: LevAttention (arXiv 2410.05462), section 2.
    """
    return quick_scores(checked("key", key))


def quick_scores(rows: Tensor) -> Tensor:
    """Leverage scores in the dtype of rows (B, H, N, D)."""
    root = None if rows.dtype == torch.float64 else cholesky_whitener(rows.mT @ rows)
    if root is None:
        # float32 would treat directions below 1/400 of the strongest as absent.
        return leverage_bounds(rows).to(rows.dtype)
    return score_rows(rows, root)


def leverage_bounds(rows: Tensor, totals: Totals = WHOLE) -> Tensor:
    """Leverage scores (B, H, N), float64, rounded up, of rows (B, H, N, D)."""
    return weighted_leverage(*whitened(rows, totals), totals)[0].clamp_max(1.0)


def whitened(rows: Tensor, totals: Totals) -> tuple[Tensor, Tensor]:
    """`K W` (B, H, N, r) in float64, whose Gram matrix is a projection, and which columns are zero, bool (B, H, r)."""
    if rows.dtype == torch.float64:  # whose squares float64 may not hold; powers of two cancel
        rows = rows / power_of_two(totals.max(row_maximum(rows.abs().mT)).mT.clamp_min(0.0))
    root = root64(totals.sum(gram64(rows)), rows.dtype)
    kept = (root != 0).flatten(0, -2).any(0)
    kept[0] |= ~kept.any()
    root = root[..., kept]
    return rows.double() @ root, (root == 0).all(-2)


def weighted_leverage(
    basis: Tensor, empty: Tensor, totals: Totals, weight: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """`k^T M^-1 k` (B, H, N), rounded up, `M = sum_l weight_l k_l k_l^T` without `empty` columns; and its error."""
    matrix = totals.sum((basis if weight is None else basis * weight.unsqueeze(-1)).mT @ basis)
    root, doubt = inverse_root(matrix, empty.double())
    return (basis @ root).square().sum(-1) * (1 + doubt.clamp_max(1.0)).unsqueeze(-1), doubt


def inverse_root(matrix: Tensor, empty: Tensor) -> tuple[Tensor, Tensor]:
    """W with `W W^T = matrix^-1`, and the relative error (B, H) of any `k^T W W^T k`; infinite: no inverse.

    Zero columns, marked in `empty` (B, H, D), get a one on the diagonal. After scaling to a unit diagonal, Cholesky's
    error in the matrix is at most a small multiple of `D u`, magnified by the inverse, whose norm is at most `|W|_F^2`.
    """
    scale = (matrix.diagonal(dim1=-2, dim2=-1) + empty).clamp_min(torch.finfo(matrix.dtype).tiny).rsqrt()
    matrix = matrix * scale.unsqueeze(-1) * scale.unsqueeze(-2) + torch.diag_embed(empty)
    finite = matrix.isfinite().all(-1).all(-1)
    eye = torch.eye(matrix.shape[-1], dtype=matrix.dtype, device=matrix.device)
    factor, info = torch.linalg.cholesky_ex(torch.where(finite[..., None, None], matrix, eye))
    sound = finite & (info == 0)
    factor = torch.where(sound[..., None, None], factor, eye)
    root = inverse_of(factor)
    error = 4 * matrix.shape[-1] * torch.finfo(matrix.dtype).eps * root.square().sum((-2, -1))
    return root * scale.unsqueeze(-1), torch.where(sound, error, torch.inf)
