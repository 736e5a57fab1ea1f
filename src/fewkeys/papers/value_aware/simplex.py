"""The point of a small polytope that is nearest to zero: the re-fit inside every value-aware solver.

`min ||sum_j w_j D_j||` over `w >= 0, sum w = 1` by Wolfe's method (Finding the nearest point in a polytope, 1976): find
the nearest point of the plane through the active points, step back to the boundary when a weight turns negative, and
add the point that lies furthest towards zero.
"""

import torch
from torch import Tensor

RIDGE = 1e-14
"""Added to the Gram matrix of the active points, relative to its diagonal, so that duplicates factorise: as much as the
matrix is rounded, which iterative refinement would amplify for thin polytopes."""


def nearest_in_hull(points: Tensor, allowed: Tensor, start: Tensor) -> Tensor:
    """Weights (R, S) on the simplex whose combination of `points` has the smallest norm.

    Args:
        points: (R, S, d) float64, relative to the target.
        allowed: (R, S) bool, at least one point per row.
        start: (R, S) weights on allowed points, at most d + 2 of them nonzero, as in the result.

    A row stops when its duality gap is 1e-12 of the squared norm, or when rounding stops the descent. Cost per row and
    step: a Cholesky factorisation of size min(S, d + 2), and 2 S d.
    """
    scale = points.square().sum(-1).masked_fill(~allowed, 0.0).amax(1)
    result, weights, active = start.clone(), start, start > 0
    todo = torch.arange(len(points), device=points.device)
    # Where the plane of the active points is solved, the next step adds a point.
    solved = active.sum(1) < 2
    before = torch.full_like(scale, torch.inf)
    for _ in range(4 * points.shape[1] + 40):
        output = (weights[:, None] @ points)[:, 0]
        value = output.square().sum(1)
        lowest, best = (points @ output[..., None])[..., 0].masked_fill(~allowed, torch.inf).min(1)
        flat = value - lowest <= 1e-12 * value + 1e-30 * scale
        done = solved & (flat | (value >= before * (1 - 1e-13)))
        before = torch.where(solved, value, before)
        if bool(done.any()):
            result[todo[done]] = weights[done]
            if bool(done.all()):
                return result
            state = todo, points, allowed, weights, active, solved, before, scale, best
            todo, points, allowed, weights, active, solved, before, scale, best = (rows[~done] for rows in state)
        rows = torch.arange(len(todo), device=points.device)
        active = active.clone()
        active[rows[solved], best[solved]] = True
        goal = plane(points, active)
        blocked = active & (goal < 0)
        step, removed = torch.where(blocked, weights / (weights - goal).clamp_min(1e-300), torch.inf).min(1)
        solved = ~blocked.any(1)
        weights = torch.lerp(weights, goal, torch.where(solved, 1.0, step.clamp_max(1.0))[:, None]).clamp_min(0.0)
        blocking = rows[~solved], removed[~solved]
        weights[blocking], active[blocking] = 0.0, False
        weights = weights / weights.sum(1, keepdim=True)
    result[todo] = weights
    return result


def plane(points: Tensor, active: Tensor) -> Tensor:
    """Weights (R, S) of sum one and either sign, on the at most d + 2 active points, nearest to zero when combined.

    With `M = c 1 1^T + D D^T + ridge`, `w = M^-1 1 / (1^T M^-1 1)`.
    """
    slots = points.shape[2] + 2
    if slots < points.shape[1]:
        used, index = active.to(torch.int8).topk(slots, 1)
        weights = plane(points.gather(1, index[..., None].expand(-1, -1, points.shape[2])), used.bool())
        return torch.zeros_like(active, dtype=points.dtype).scatter(1, index, weights)
    ones = active.to(points.dtype)[..., None]
    unit = torch.cholesky_solve(ones, factorise(points, active)) * ones
    return (unit / unit.sum(1, keepdim=True))[..., 0]


def factorise(points: Tensor, active: Tensor) -> Tensor:
    """The Cholesky factor of `c 1 1^T + D D^T + ridge` on the active points, identity on the others: (R, S, S)."""
    inner = points * active[..., None]
    gram = inner @ inner.mT
    size = gram.diagonal(dim1=-2, dim2=-1).amax(-1)
    size = torch.where(size > 0, size, 1.0)[:, None, None]
    gram = gram / size + (active[:, :, None] & active[:, None, :])
    # The ridge grows only for the rows that need it.
    ridge = RIDGE
    factor: Tensor
    factor, info = torch.linalg.cholesky_ex(gram + torch.diag_embed(torch.where(active, ridge, 1.0)))
    while bool(info.any()) and ridge < 1e-6:
        ridge *= 100
        failed = info > 0
        diagonal = torch.diag_embed(torch.where(active[failed], ridge, 1.0))
        factor[failed], info[failed] = torch.linalg.cholesky_ex(gram[failed] + diagonal)
    return factor
