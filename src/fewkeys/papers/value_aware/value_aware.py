"""The r weights per row that are best without knowledge of the values, and with it."""

import math
from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from fewkeys.core.validation import check_count, check_finite, describe
from fewkeys.papers.value_aware import supports
from fewkeys.papers.value_aware.caratheodory import caratheodory
from fewkeys.papers.value_aware.supports import Fit, Mixtures
from fewkeys.sketch.gram import power_of_two

Method = Literal["auto", "greedy", "eliminate"]
SOLVERS: dict[str, Callable[[Mixtures, int], Fit]] = {
    "auto": supports.search,
    "greedy": supports.greedy,
    "eliminate": supports.eliminate,
}
BLOCK = 4_000_000
"""Float64 numbers in the largest tensors of one block of rows."""


def value_oblivious(weights: Tensor, r: int, form: Literal["renormalised", "projected"] = "renormalised") -> Tensor:
    """The r largest weights of every row, put back on the simplex.

    Args:
        weights: (..., N), non-negative rows that sum to one; rows of zeros stay zero.
        r: largest number of nonzeros per row, at least 1.
        form: "renormalised": `b_j = a_j / sum_S a`, which keeps proportions. "projected":
            `b_j = a_j + (1 - sum_S a) / |S|`, the Euclidean projection onto the simplex over S, which is the l2-best
            approximation of the row with at most r entries.

    Returns (..., N). Cost O(N log r) per row. Raises `TypeError`, `ValueError` for malformed arguments.

    Source: Value-aware Approximate Attention (arXiv 2103.09857), section 3.
    """
    check_count("r", r)
    if not isinstance(weights, Tensor) or not weights.is_floating_point() or weights.ndim < 1:
        raise TypeError(f"weights: expected a floating tensor (..., N), got {type(weights).__name__}")
    _check_rows(weights)
    if form not in ("renormalised", "projected"):
        raise ValueError(f"form: expected 'renormalised' or 'projected', got {form!r}")
    top = weights.topk(min(r, weights.shape[-1]), -1)
    values, total = top.values, top.values.sum(-1, keepdim=True)
    if form == "renormalised":
        values = values / torch.where(total > 0, total, 1.0)
    else:
        added = (1 - total) / (values > 0).sum(-1, keepdim=True).clamp_min(1)
        values = torch.where(values > 0, values + added, values)
    return torch.zeros_like(weights).scatter(-1, top.indices, values)


def value_aware(
    weights: Tensor, values: Tensor, r: int, method: Method = "auto", *, mask: Tensor | None = None
) -> Tensor:
    """At most r weights per row for which the output of attention changes least.

    `argmin ||sum_j a_j v_j - sum_j b_j v_j||` over `b >= 0, sum b = 1, at most r nonzero`. With rho the dimension of
    the smallest plane that holds a head's values (rho <= Dv and rho < N):

    - `r >= rho + 1`: exact, the error is zero up to rounding (Caratheodory's theorem);
    - `r = 1`: exact, the value nearest to the output;
    - between: NP-hard in general. "auto" is the best of greedy growth and elimination from the Caratheodory solution,
      improved by pairwise exchanges, with the best weights for every support tried.

    Never worse than either form of `value_oblivious`; with "auto" the error never increases with r.

    Args:
        weights: (..., Nq, N), rows on the simplex. Rows of zeros stay zero.
        values: (..., N, Dv); its leading dimensions broadcast to those of weights.
        r: largest number of nonzeros per row, at least 1.
        method: "auto", or for the sizes between one solver alone: "greedy" or "eliminate".
        mask: (..., Nq, N) bool, broadcasting to weights: True where a row may put weight, by default everywhere. So
            give the causal or padding mask.

    Returns:
        (..., Nq, N) in the dtype of weights, computed in float64. Cost per row: exact `O(N Dv + Dv^3 log(N / Dv))`;
        between, "auto" about 20 times r (N Dv r + r^3). Memory: the input and one block of rows.

    Raises:
        TypeError, ValueError: malformed or non-finite arguments, rows off the simplex, weight where mask is False.

    Source: Value-aware Approximate Attention (arXiv 2103.09857), section 3; Maalouf, Jubran, Feldman (arXiv
    1906.04705) for the exact case; Wolfe (1976) for the best weights of a support. The solvers between are ours.
    """
    check_count("r", r)
    if method not in SOLVERS:
        raise ValueError(f"method: expected 'auto', 'greedy' or 'eliminate', got {method!r}")
    values = _checked(weights, values)
    visible = torch.ones_like(weights, dtype=torch.bool) if mask is None else _checked_mask(mask, weights)
    heads = (tensor.detach().reshape(-1, *tensor.shape[-2:]) for tensor in (weights, values, visible))
    result = [_of_head(rows, points, seen, r, method) for rows, points, seen in zip(*heads, strict=True)]
    return torch.stack(result).view(weights.shape)


def _of_head(weights: Tensor, values: Tensor, visible: Tensor, r: int, method: Method) -> Tensor:
    points = _plane_coordinates(values.double())
    count, rho = points.shape
    row_size = count * (rho + 1) if r > rho else 6 * count * min(r, rho) + 4 * rho * rho
    block = max(1, min(128, BLOCK // row_size))
    parts = []
    for part, seen in zip(weights.split(block), visible.split(block), strict=True):
        live = part.sum(1) > 0
        dense = torch.zeros_like(part, dtype=torch.float64)
        if bool(live.any()):
            dense[live] = _solve(part[live].double(), points, seen[live], r, method)
        parts.append(dense.to(weights.dtype))
    return torch.cat(parts)


def _solve(weights: Tensor, points: Tensor, visible: Tensor, r: int, method: Method) -> Tensor:
    weights = weights / weights.sum(1, keepdim=True)
    if r > points.shape[1]:
        dense = caratheodory(weights, points)
    else:
        rows = Mixtures(points, weights, weights @ points, visible)
        fit = supports.nearest(rows)
        if r > 1:
            fit = supports.better(SOLVERS[method](rows, r), supports.oblivious(rows, r))
        dense = torch.zeros_like(weights).scatter_add(1, fit.indices, fit.weights)
    # In float64, so that only the final rounding moves a row off the simplex.
    return dense / dense.sum(1, keepdim=True)


def _plane_coordinates(points: Tensor) -> Tensor:
    """Points (N, d) float64 in orthonormal coordinates of the plane that holds them, about their mean, in units of
    their size: (N, rho).

    Centring keeps a common offset from drowning the differences. rho counts the singular values above
    1e-13 sqrt(max(N, d)) of the largest: rounding leaves as much of a zero.
    """
    points = points / power_of_two(points.abs().amax())  # squares of large and small values leave the range of float64
    left, sizes, _ = torch.linalg.svd(points - points.mean(0), full_matrices=False)
    # The subtraction rounds relative to the points, not to the differences.
    size = points.abs().amax() * math.sqrt(points.numel())
    floor = max(1e-13 * math.sqrt(max(points.shape)) * float(sizes[0]), 1e-15 * float(size))
    # Identical values keep one coordinate: solvers need not handle points without any.
    rho = max(1, int((sizes > floor).sum()))
    coordinates: Tensor = left[:, :rho] * sizes[:rho]
    return coordinates


def _checked(weights: Tensor, values: Tensor) -> Tensor:
    """The values, with the leading dimensions of the weights."""
    for name, tensor, shape in (("weights", weights, "(..., Nq, N)"), ("values", values, "(..., N, Dv)")):
        if not isinstance(tensor, Tensor) or not tensor.is_floating_point():
            raise TypeError(f"{name}: expected a floating tensor {shape}, got {describe(tensor)}")
        if tensor.ndim < 2 or 0 in tensor.shape:
            raise ValueError(f"{name}: expected a non-empty tensor {shape}, got shape {tuple(tensor.shape)}")
    if values.shape[-2] != weights.shape[-1]:
        raise ValueError(f"values: expected {weights.shape[-1]} rows, one per key of weights, got {values.shape[-2]}")
    if values.device != weights.device:
        raise ValueError(f"values: expected {weights.device} like weights, got {values.device}; use values.to(weights)")
    try:
        of_heads = values.expand(*weights.shape[:-2], *values.shape[-2:])
    except RuntimeError:
        raise ValueError(
            f"values: expected leading dimensions that broadcast to {tuple(weights.shape[:-2])} like weights, got "
            f"{tuple(values.shape[:-2])}; for grouped queries repeat the heads with repeat_interleave"
        ) from None
    check_finite(values=values)
    _check_rows(weights)
    return of_heads


def _check_rows(weights: Tensor) -> None:
    """Refuse rows that are neither on the simplex nor zero."""
    check_finite(weights=weights)
    if bool((weights < 0).any()):
        raise ValueError(
            f"weights: expected no negative entries, got {float(weights.min()):.3g}; normalise the scores first"
        )
    sums = weights.sum(-1, dtype=torch.float64)
    # The error of a sum of entries rounded to the dtype, with room for a softmax in it.
    slack = min(0.05, max(1e-5, 8 * torch.finfo(weights.dtype).eps * math.sqrt(weights.shape[-1])))
    off = ((sums - 1).abs() > slack) & (sums != 0)
    if bool(off.any()):
        raise ValueError(
            f"weights: expected rows that sum to one (or are zero), got a row with sum {float(sums[off][0]):.6g}; "
            "divide each row by its sum"
        )


def _checked_mask(mask: Tensor, weights: Tensor) -> Tensor:
    shape = tuple(weights.shape)
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool:
        raise TypeError(f"mask: expected a bool tensor that broadcasts to weights {shape}, got {describe(mask)}")
    try:
        visible = mask.expand(shape)
    except RuntimeError:
        got = tuple(mask.shape)
        raise ValueError(f"mask: expected a shape that broadcasts to weights {shape}, got {got}") from None
    if bool((weights.masked_fill(visible, 0.0) > 0).any()):
        raise ValueError(
            "mask: expected True wherever weights are positive, got weight on hidden keys; mask the scores"
        )
    return visible
