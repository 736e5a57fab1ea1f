"""Leverage scores: how much of a key's direction no other key has.

`score_j = k_j^T (K^T K)^+ k_j = sup_y <k_j, y>^2 / sum_l <k_l, y>^2`, in [0, 1], summing to rank(K). With weights
`|s|^2` no query can give key j more attention than its score, so the keys with `score >= eps` hold every entry >= eps,
for any query (LevAttention, arXiv 2410.05462, section 2). For weights `|s|^p` the same holds of the l_p sensitivities,
bounded from above in lewis.py.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fewkeys.core.precision import full_precision, working
from fewkeys.core.validation import check_finite, check_real, check_tensor
from fewkeys.sketch.gram import gram, score_rows, whitener
from fewkeys.sketch.lewis import sensitivity_bounds

ROUNDING = 1e-9
"""Rounding must not drop a key that sits exactly at eps: float64 scores count from `eps * (1 - ROUNDING)` on."""


@full_precision()
def leverage_scores(key: Tensor, power: float = 2.0, ridge: float = 0.0) -> Tensor:
    """Upper bounds on the l_p sensitivity `sup_y |<k_j, y>|^p / sum_l |<k_l, y>|^p` of every key, p = `power`.

    power = 2: the sensitivity itself, the leverage score; the sum per head is r = rank(K). Other powers: Lewis
    weights, sum at most `(1 + 1e-6 max(1, p/2)) r^max(1, p/2)`. Even powers, while the symmetric tensor powers have
    at most 2500 columns: also their leverage scores, sum at most `C(r + p/2 - 1, p/2)`; the smaller bound counts.
    The proofs are in fewkeys/sketch/lewis.py.

    Args:
        key: (B, H, N, D), any floating dtype. Duplicates, zero keys (score 0), fewer keys than dimensions and any
            rank deficiency are allowed.
        power: p > 0.
        ridge: lambda >= 0, for power 2 only: `k_j^T (K^T K + lambda I)^-1 k_j`, the supremum with `lambda |y|^2` added
            below the line; small for keys whose direction is hardly there.

    Returns:
        (B, H, N), in [0, 1], float64 for float64 input and float32 otherwise. Cost O(N D^2) for power 2,
        O(N D^2) per step (3 to 60 for p from 0.5 to 8) for Lewis weights, O(N m^2) for tensor powers of m columns.

    Raises:
        TypeError, ValueError: `key` is not a finite floating tensor of rank 4, `power` is not positive, `ridge` is
            negative or given with another power.

    Source: LevAttention (arXiv 2410.05462), section 2; Cohen and Peng (arXiv 1412.0588) for Lewis weights.
    """
    rows = working(check_tensor("key", key)).detach()
    power = check_real("power", power, above=0.0)
    ridge = check_real("ridge", ridge)
    if ridge < 0 or (ridge > 0 and power != 2):
        raise ValueError(f"ridge: expected 0, or a positive number with power=2, got {ridge} with power={power}")
    check_finite(key=rows)
    if power != 2 or (rows.dtype == torch.float64 and not ridge):
        return sensitivity_bounds(rows, power).to(rows.dtype)
    matrix = gram(rows)
    if ridge:
        # Where the ridge is far below the rounding of the Gram matrix, the pseudoinverse is its limit.
        matrix = matrix + ridge * torch.eye(rows.shape[-1], dtype=rows.dtype, device=rows.device)
    elif not _well_conditioned(matrix):
        # float32 would take directions of 1/400 of the strongest for absent ones.
        return sensitivity_bounds(rows, power).to(rows.dtype)
    return score_rows(rows, whitener(matrix))


@full_precision()
def universal_set(key: Tensor, eps: float, power: float = 2.0, *, bounded_growth: bool = False) -> Tensor:
    """The keys that hold every attention entry >= `eps` under weights `|s|^p`, for every possible query.

    Args:
        key: (B, H, N, D), any floating dtype.
        eps: the smallest entry that must not be missed, in (0, 1).
        power: p > 0.
        bounded_growth: cover all weights f(s) of growth at most `|s|^p` at once: f even, not decreasing in |s|, and
            `f(s) / |s|^p` not increasing. Huber and Tukey's biweight have p = 2, at any threshold.

    Returns:
        bool (B, H, N). Per head at most `r / eps` keys are marked for p <= 2, r = rank(K), `r^(p/2) / eps` for p > 2;
        with `bounded_growth` at most `1 / eps` times as many. Scores are computed in float64. Cost as
        `leverage_scores`; with `bounded_growth` that of at most `1 / eps` rounds.

    Raises:
        TypeError, ValueError: malformed `key`, `eps` outside (0, 1), or `power` that is not positive.

    Source: LevAttention (arXiv 2410.05462), section 2; for `bounded_growth`, `peeled` below.
    """
    check_real("eps", eps, above=0.0, below=1.0)
    power = check_real("power", power, above=0.0)
    rows = working(check_tensor("key", key)).detach()
    check_finite(key=rows)
    if bounded_growth:
        return peeled(rows, eps, power)
    return sensitivity_bounds(rows, power) >= eps * (1 - ROUNDING)


def peeled(rows: Tensor, eps: float, power: float) -> Tensor:
    """The union of at most `1 / eps` universal sets for `|s|^p`, each of the rows that the earlier ones left.

    No f of bounded growth (see `universal_set`) has an entry >= eps outside. Proof: let `f(s_j) >= eps sum_l f(s_l)`
    and `r_l = |s_l / s_j|`. Growth gives `f(s_l) / f(s_j) >= min(1, r_l^p)`. With `S = {l != j: r_l >= 1}`, all sums
    without S including j, `|S| + sum_(l not in S) r_l^p <= 1 / eps`. Suppose j survives a round on the rows R. If R
    holds members of S, the one of largest r, m, has `sum_(l in R) r_l^p <= |S| r_m^p + sum_(l not in S) r_l^p <=
    r_m^p / eps`: its share of `|s|^p` is at least eps and the round removes it. If R holds none,
    `sum_(l in R) r_l^p <= 1 / eps`: the round removes j. As `|S| <= 1 / eps - 1`, j is gone after floor(1 / eps)
    rounds. A round that removes nothing would repeat for ever, so the peeling can stop there.
    """
    marked = torch.zeros(rows.shape[:-1], dtype=torch.bool, device=rows.device)
    for _ in range(int(1 / eps * (1 + ROUNDING))):
        found = sensitivity_bounds(rows.masked_fill(marked.unsqueeze(-1), 0.0), power) >= eps * (1 - ROUNDING)
        if not bool((found & ~marked).any()):
            break
        marked = marked | found
    return marked


def _well_conditioned(matrix: Tensor) -> bool:
    """Whether `whitener` would take the Cholesky factor of every matrix."""
    factor, info = torch.linalg.cholesky_ex(matrix)
    pivots = factor.diagonal(dim1=-2, dim2=-1).square()
    floor = 100 * matrix.shape[-1] * torch.finfo(matrix.dtype).eps
    return bool(((info == 0) & (pivots.amin(-1) > floor * pivots.amax(-1))).all())
