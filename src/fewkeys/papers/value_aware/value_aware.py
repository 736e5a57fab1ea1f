"""The r weights per row with the least output error, chosen with knowledge of the values."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Literal

import torch
from torch import Tensor

from fewkeys.core.validation import check_count, check_finite
from fewkeys.papers.value_aware import supports
from fewkeys.papers.value_aware.caratheodory import caratheodory
from fewkeys.papers.value_aware.supports import Fit, Mixtures

Method = Literal["auto", "caratheodory", "nearest", "greedy", "eliminate", "pairwise", "exhaustive"]
SOLVERS: dict[str, Callable[[Mixtures, int], Fit]] = {
    "auto": supports.search,
    "greedy": supports.greedy,
    "eliminate": supports.eliminate,
    "pairwise": supports.pairwise,
    "exhaustive": supports.exhaustive,
}
# The most float64 numbers in the largest tensors of one block of rows.
BLOCK = 4_000_000


def value_aware(
    weights: Tensor, values: Tensor, r: int, method: Method = "auto", *, mask: Tensor | None = None
) -> Tensor:
    """At most r weights per row, chosen so that the output of attention changes least.

    `argmin ||sum_j a_j v_j - sum_j b_j v_j||` over `b >= 0, sum b = 1, at most r nonzero`. With rho the dimension of
    the smallest plane that holds a head's values (rho <= Dv and rho < N):

    - `r >= rho + 1`: exact, the error is zero up to rounding (Caratheodory's theorem; `caratheodory`);
    - `r = 1`: exact, the value nearest to the output;
    - between: no fast exact method is known (the problem is NP-hard in general). "auto" is the best, row by row, of
      greedy growth, elimination continued from the Caratheodory solution, and pairwise exchanges, with the weights
      re-fitted exactly for every support tried; where there are at most 500 supports it tries them all.

    Whatever the method, the result is never worse than either form of `value_oblivious`; with "auto" the error never
    increases with r.

    Args:
        weights: (..., Nq, N), rows on the simplex (attention weights). Rows of zeros stay zero.
        values: (..., N, Dv); its leading dimensions broadcast to those of weights.
        r: largest number of nonzeros per row, at least 1.
        method: "auto"; "caratheodory" (r >= rho + 1 only), "nearest" (r = 1 only), "exhaustive" (every support, at most
            20 000), or one solver alone: "greedy", "eliminate", "pairwise". The three solvers and "exhaustive" leave
            r = 1 and r >= rho + 1 to the exact methods.
        mask: (..., Nq, N) bool, broadcasting to weights: True where a row may put weight. Default: every key, also
            those with weight zero, so give the causal or padding mask where there is one.

    Returns:
        (..., Nq, N) in the dtype of weights. Computed in float64, rounded once. Cost per row: exact O(N Dv + Dv^3 log(N
        / Dv)); between, "auto" O(r (N Dv r + r^3)) times a constant near 20. Memory: the input and one block of rows.

    Raises:
        TypeError, ValueError: malformed or non-finite arguments, rows off the simplex, weight where mask is False, a
            method that does not fit r.

    Source: Value-aware Approximate Attention (arXiv 2103.09857), section 3; Maalouf, Jubran, Feldman (arXiv
    1906.04705) for the exact case; Wolfe (1976) for the re-fit. The solvers between are ours.
    """
    check_count("r", r)
    if method not in ("caratheodory", "nearest", *SOLVERS):
        raise ValueError(
            "method: expected 'auto', 'caratheodory', 'nearest', 'greedy', 'eliminate', 'pairwise' or 'exhaustive', "
            f"got {method!r}"
        )
    check_pair(weights, values)
    visible = check_mask(mask, weights)
    if method == "nearest" and r != 1:
        raise ValueError(f"method: expected r = 1 with 'nearest', got r = {r}; use method='auto'")
    result = torch.zeros_like(weights)
    for head, points, out in _heads(weights, values, result):
        count, rho = points.shape
        if method == "caratheodory" and r < min(rho + 1, count):
            raise ValueError(
                f"r: expected at least {rho + 1} with method='caratheodory' (the values span {rho} dimensions), "
                f"got {r}; use method='auto'"
            )
        if method == "exhaustive" and 1 < r <= rho and math.comb(count, r) > 20_000:
            raise ValueError(
                f"method: expected at most 20000 supports with 'exhaustive', got {math.comb(count, r)} "
                f"({r} of {count}); use method='auto'"
            )
        exact = r > rho and method != "nearest"
        for block in _blocks(weights[head], count * (rho + 1) if exact else 6 * count * min(r, rho) + 4 * rho * rho):
            rows = _rows(weights[head][block], points, None if visible is None else visible[head][block])
            live = rows.weights.sum(1) > 0
            if not bool(live.any()):
                continue
            rows = rows.part(live)
            if exact:
                dense = caratheodory(rows.weights, points[None], torch.zeros_like(rows.weights[:, 0], dtype=torch.long))
            else:
                dense = _solve(rows, r, method).dense(count)
            # The sum is one in float64, so that only the final rounding moves a row off the simplex.
            dense = dense / dense.sum(1, keepdim=True)
            out[block] = torch.zeros_like(out[block]).masked_scatter(live[:, None], dense.to(out.dtype))
    return result


def _solve(rows: Mixtures, r: int, method: str) -> Fit:
    if r == 1:
        return supports.nearest(rows)
    fit = SOLVERS[method](rows, r)
    return supports.better(fit, supports.oblivious(rows, r))


def _heads(weights: Tensor, values: Tensor, result: Tensor) -> Iterator[tuple[tuple[int, ...], Tensor, Tensor]]:
    """Every head: its place, its values in the coordinates of their own plane (N, rho) float64, its part of result."""
    lead = weights.shape[:-2]
    values = values.detach().expand(*lead, *values.shape[-2:])
    places = (
        torch.cartesian_prod(*(torch.arange(n, device="cpu") for n in lead)).view(-1, len(lead)).tolist()
        if lead
        else [[]]
    )
    for place in places:
        head = tuple(place)
        yield head, plane_coordinates(values[head].double()), result[head]


def plane_coordinates(points: Tensor) -> Tensor:
    """Points (N, d) float64 in orthonormal coordinates of the plane that holds them, about their mean: (N, rho).

    All distances stay. Centring keeps a common offset from drowning the differences. rho counts the singular values
    above 1e-13 sqrt(max(N, d)) of the largest: rounding leaves as much of a zero. The error this makes is as small.
    """
    centred = points - points.mean(0)
    # The rounding of the subtraction is relative to the points, not to the differences.
    size = points.abs().amax() * math.sqrt(points.numel())
    left, sizes, _ = torch.linalg.svd(centred, full_matrices=False)
    floor = max(1e-13 * math.sqrt(max(points.shape)) * float(sizes[0]), 1e-15 * float(size))
    # Identical values keep one coordinate, so that solvers need not handle points without coordinates.
    rho = max(1, int((sizes > floor).sum()))
    coordinates: Tensor = left[:, :rho] * sizes[:rho]
    return coordinates


def _blocks(rows: Tensor, each: int) -> Iterator[slice]:
    """Slices of one head's rows with at most `BLOCK` numbers at `each` numbers per row."""
    step = max(1, min(128, BLOCK // max(1, each)))
    for start in range(0, rows.shape[0], step):
        yield slice(start, start + step)


def _rows(weights: Tensor, points: Tensor, visible: Tensor | None) -> Mixtures:
    weights = weights.detach().double()
    total = weights.sum(1, keepdim=True)
    weights = weights / torch.where(total > 0, total, 1.0)
    chosen = torch.ones_like(weights, dtype=torch.bool) if visible is None else visible
    return Mixtures(points, weights, weights @ points, chosen)


def check_pair(weights: object, values: object) -> None:
    """Raise for weights that are not rows on the simplex (or zero), and for values that do not fit them."""
    for name, tensor, shape in (("weights", weights, "(..., Nq, N)"), ("values", values, "(..., N, Dv)")):
        if not isinstance(tensor, Tensor) or not tensor.is_floating_point():
            got = tensor.dtype if isinstance(tensor, Tensor) else type(tensor).__name__
            raise TypeError(f"{name}: expected a floating tensor {shape}, got {got}")
        if tensor.ndim < 2 or 0 in tensor.shape:
            raise ValueError(f"{name}: expected a non-empty tensor {shape}, got shape {tuple(tensor.shape)}")
    if not isinstance(weights, Tensor) or not isinstance(values, Tensor):  # for the type checker: refused above
        return
    if values.shape[-2] != weights.shape[-1]:
        raise ValueError(f"values: expected {weights.shape[-1]} rows, one per key of weights, got {values.shape[-2]}")
    if values.device != weights.device:
        raise ValueError(f"values: expected {weights.device} like weights, got {values.device}; use values.to(weights)")
    try:
        fits = torch.broadcast_shapes(weights.shape[:-2], values.shape[:-2]) == weights.shape[:-2]
    except RuntimeError:
        fits = False
    if not fits:
        raise ValueError(
            f"values: expected leading dimensions that broadcast to {tuple(weights.shape[:-2])} like weights, got "
            f"{tuple(values.shape[:-2])}; for grouped queries repeat the heads with repeat_interleave"
        )
    check_finite(weights=weights, values=values)
    if bool((weights < 0).any()):
        raise ValueError(
            f"weights: expected no negative entries, got {float(weights.min()):.3g}; normalise the scores first"
        )
    sums = weights.sum(-1, dtype=torch.float64)
    # The error of a row's sum when its entries are rounded to the dtype, with room for a softmax in that dtype.
    slack = min(0.05, max(1e-5, 8 * torch.finfo(weights.dtype).eps * math.sqrt(weights.shape[-1])))
    off = ((sums - 1).abs() > slack) & (sums != 0)
    if bool(off.any()):
        raise ValueError(
            f"weights: expected rows that sum to one (or are zero), got a row with sum {float(sums[off][0]):.6g}; "
            "divide each row by its sum"
        )


def check_mask(mask: object, weights: Tensor) -> Tensor | None:
    """The mask in the shape of weights, or None. Raises `ValueError` for a mask that hides weight."""
    if mask is None:
        return None
    shape = tuple(weights.shape)
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool:
        got = mask.dtype if isinstance(mask, Tensor) else type(mask).__name__
        raise TypeError(f"mask: expected a bool tensor that broadcasts to weights {shape}, got {got}")
    try:
        visible = mask.expand(shape)
    except RuntimeError:
        raise ValueError(
            f"mask: expected a shape that broadcasts to weights {shape}, got {tuple(mask.shape)}"
        ) from None
    if bool((weights.masked_fill(visible, 0.0) > 0).any()):
        raise ValueError(
            "mask: expected True wherever weights are positive, got weight on hidden keys; mask the scores"
        )
    return visible
