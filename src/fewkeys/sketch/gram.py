"""Gram matrices of rows, and their inverse roots."""

import math

import torch
from torch import Tensor

from fewkeys.core.precision import working_dtype

BLOCK = 4096
"""Rows that are converted to float64 and summed at once."""
SUBSPACE_STEPS = 3
LEAST_DIRECTION = 4e-6
"""Weaker directions of a subspace, relative to the strongest, count as rounding, in every dtype."""


def product(left: Tensor, right: Tensor) -> Tensor:
    """`left @ right` in float64: the bits do not depend on the number of threads."""
    return torch.matmul(left.double(), right.double()).to(left.dtype)


def cholesky_whitener(matrix: Tensor) -> Tensor | None:
    """Upper triangular W with `W W^T = matrix^-1`; None unless every matrix of the batch is well conditioned."""
    size = matrix.shape[-1]
    factor, info = torch.linalg.cholesky_ex(matrix)
    pivots = factor.diagonal(dim1=-2, dim2=-1).square()
    floor = 100 * size * torch.finfo(matrix.dtype).eps
    if not bool(((info == 0) & (pivots > floor * matrix.diagonal(dim1=-2, dim2=-1)).all(-1)).all()):
        return None
    return inverse_of(factor)


def inverse_of(factor: Tensor) -> Tensor:
    """Upper triangular W with `W W^T = (L L^T)^-1` for lower triangular L (..., D, D)."""
    eye = torch.eye(factor.shape[-1], dtype=factor.dtype, device=factor.device)
    root: Tensor = torch.linalg.solve_triangular(factor.mT, eye.expand_as(factor), upper=True)
    return root


def triangular_root(matrix: Tensor, ridge: float) -> Tensor:
    """Lower triangular L (..., D, D) with `L L^T = matrix + ridge mean(diagonal) I`, approximately.

    If rounding has made a semidefinite matrix indefinite, its eigenvalues below the ridge are raised to it, in float64.
    """
    least = ridge * matrix.diagonal(dim1=-2, dim2=-1).mean(-1, keepdim=True) + torch.finfo(matrix.dtype).tiny
    root: Tensor
    root, info = torch.linalg.cholesky_ex(matrix + torch.diag_embed(least.expand(matrix.shape[:-1])))
    if not bool((info > 0).any()):
        return root
    values, vectors = torch.linalg.eigh(matrix.double())
    raised = vectors * values.maximum(least.double()).unsqueeze(-2) @ vectors.mT
    mended, _ = torch.linalg.cholesky_ex(raised)
    return torch.where((info > 0)[..., None, None], mended.to(matrix.dtype), root)


def score_rows(rows: Tensor, root: Tensor) -> Tensor:
    """`k^T W W^T k` (..., N) for rows (..., N, D) and a whitener W (..., D, D), at most 1."""
    return (rows @ root).square().sum(-1).clamp_max(1.0)


def power_of_two(sizes: Tensor) -> Tensor:
    """The powers of two just above positive `sizes`, and 1 for zero: factors that do not round. At most the largest."""
    exponent = torch.frexp(sizes).exponent
    return torch.ldexp(torch.ones_like(sizes), exponent.clamp_max(math.frexp(torch.finfo(sizes.dtype).max)[1] - 1))


def gram64(rows: Tensor) -> Tensor:
    """`K^T K` (..., D, D), float64, in O(D^2) memory besides one block of rows (..., N, D)."""
    total = rows.new_zeros((*rows.shape[:-2], rows.shape[-1], rows.shape[-1]), dtype=torch.float64)
    for part in map(Tensor.double, rows.split(BLOCK, -2)):
        total += part.mT @ part
    return total


def root64(matrix: Tensor, dtype: torch.dtype) -> Tensor:
    """W with `k^T W W^T k = k^T matrix^+ k` for every k in the range of the float64 Gram matrix of rows of `dtype`.

    Powers of two first scale the columns of the rows to norms near one, which costs no accuracy and changes no score.
    Directions that are then below a few units in the last place of `dtype` of the strongest one are rounding: their
    columns of W are zero.
    """
    scale = power_of_two(matrix.diagonal(dim1=-2, dim2=-1).clamp_min(0.0).sqrt()).unsqueeze(-1)
    matrix = matrix / (scale * scale.mT)
    if (root := cholesky_whitener(matrix)) is not None:
        return root / scale
    values, vectors = torch.linalg.eigh(matrix)
    info = torch.finfo(matrix.dtype)
    floor = max((4 * torch.finfo(working_dtype(dtype)).eps) ** 2, (matrix.shape[-1] + 8) * info.eps)
    keep = values > floor * values.amax(-1, keepdim=True).clamp_min(info.tiny)
    inverse = torch.where(keep, values.clamp_min(info.tiny).rsqrt(), 0.0)
    return torch.mul(vectors, inverse.unsqueeze(-2)) / scale


def top_subspace(matrix: Tensor, rank: int) -> Tensor:
    """Orthonormal columns (..., D, rank) near the leading eigenvectors of a positive semidefinite matrix (..., D, D).

    Block power iteration from a cosine basis. Columns whose size is at most `LEAST_DIRECTION` of the first are zero:
    rounding would determine them and their gradients.
    """
    dtype, matrix = matrix.dtype, matrix.double()  # as `product`
    size = matrix.shape[-1]
    grid = torch.arange(size, dtype=matrix.dtype, device=matrix.device)
    basis = torch.cos((grid[:, None] + 0.5) * grid[:rank] * (torch.pi / size)).expand(*matrix.shape[:-1], rank)
    for _ in range(SUBSPACE_STEPS):
        basis, sizes = torch.linalg.qr(matrix @ basis)
        sizes = sizes.diagonal(dim1=-2, dim2=-1).abs().unsqueeze(-2)
        basis = basis * (sizes > LEAST_DIRECTION * sizes[..., :1])
    return basis.to(dtype)
