"""Upper bounds on l_p sensitivities, `sigma_j = sup_y |<k_j, y>|^p / sum_l |<k_l, y>|^p`, for every p > 0.

**Even p, tensor powers.** `<k, y>^p = <phi(k), phi(y)>^2` with the features of degree p/2 (tensor_power.py): sigma_j is
at most the leverage score of phi(k_j). For p = 2 they are equal.

**Any p, Lewis weights.** For positive weights w, with `M = sum_l w_l^(1-2/p) k_l k_l^T` and `tau_j = k_j^T M^+ k_j`,

    p <= 2    sigma_j <= C tau_j^(p/2),  C = max_l (tau_l^(p/2) / w_l)^((2-p)/p)
    p >= 2    sigma_j <= (sum_l w_l)^(p/2-1) tau_j^(p/2)

At the Lewis weights, the fixed point `w_j = tau_j^(p/2)`, the bounds sum to r and `r^(p/2)`, r = rank(K). *Converged*:
at most `1 + TOLERANCE max(1, p/2)` times that. p < 2 iterates `w <- tau(w)^(p/2)` (Cohen, Peng, arXiv 1412.0588), p > 2
`w <- w^(1-2/p) tau(w)`. docs/levattention.md proves the bounds, and that both converge.

Cost O(n d^2) a step. Directions in which the keys are below their own rounding count as absent (`root64`). If keys are
distributed, all processes take the same steps, and each computes the bounds of its keys.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from fewkeys.core.totals import WHOLE, Totals, row_maximum
from fewkeys.papers.levattention.tensor_power import MAX_WIDTH, even_degree, tensor_features, width
from fewkeys.sketch.gram import gram64
from fewkeys.sketch.leverage import inverse_root, leverage_bounds, weighted_leverage, whitened

TOLERANCE = 1e-6
MAX_STEPS = 1000
MAX_DOUBT = 1e-2
"""The largest relative error of the inverse of M; heads with a larger one get the bound 1."""
FEATURES = 1 << 24
"""The numbers in one block of tensor features."""


@dataclass(frozen=True, eq=False)
class Lewis:
    """Weights (B, H, N) near the fixed point and the bounds (B, H, N) proved from them, both float64.

    `excess` (B, H): the sum of the bounds, before they are cut at 1, over the theorem's total, less 1; infinite where
    float64 could not invert M, so that the bounds are 1. `steps`: the iterations made.
    """

    weights: Tensor
    bounds: Tensor
    excess: Tensor
    steps: int


def sensitivity_bounds(rows: Tensor, power: float, totals: Totals = WHOLE) -> Tensor:
    """Upper bounds (B, H, N), float64 in [0, 1], on the l_p sensitivities of rows (B, H, N, D), zero for zero rows.

    For even powers up to 60 whose features have at most `MAX_WIDTH` columns and fewer than n, the smaller of both
    bounds above. `rows` are those of this process, possibly none.
    """
    degree = even_degree(power)
    if degree == 1:
        return leverage_bounds(rows, totals)
    bounds = lewis_weights(rows, power, totals).bounds
    if degree and (columns := width(rows.shape[-1], degree)) <= MAX_WIDTH:
        keys = int(totals.sum(torch.tensor(rows.shape[-2], device=rows.device)))
        if columns < keys:
            bounds = torch.minimum(bounds, tensor_bounds(rows, degree, totals))
    return bounds


def tensor_bounds(rows: Tensor, degree: int, totals: Totals = WHOLE) -> Tensor:
    """Leverage scores (B, H, N) of the tensor powers of rows (B, H, N, D): bounds for power 2 * degree.

    The rows are whitened first: else the features' Gram matrix would have the 2 * degree-th power of their condition
    number. Where features are still linearly dependent in float64, bounds are 1: leaving out directions would
    understate scores. Cost O(n m^2) for m features.
    """
    basis, _ = whitened(rows, totals)
    columns, heads = width(basis.shape[-1], degree), basis.shape[:-2].numel()
    parts = basis.split(max(1, FEATURES // (columns * heads)), -2)
    total = basis.new_zeros((*basis.shape[:-2], columns, columns))
    for part in parts:
        total += gram64(tensor_features(part, degree))
    total = totals.sum(total)
    root, doubt = inverse_root(total, (total.diagonal(dim1=-2, dim2=-1) == 0).double())
    scores = torch.cat([(tensor_features(part, degree) @ root).square().sum(-1) for part in parts], -1)
    bounds = (scores * (1 + doubt).unsqueeze(-1)).clamp_max(1.0)
    return bounds.where(doubt.unsqueeze(-1) <= TOLERANCE, 1.0)


def lewis_weights(rows: Tensor, power: float, totals: Totals = WHOLE) -> Lewis:
    """Lewis weights of rows (B, H, N, D) for a power p > 0, and their bounds."""
    basis, empty = whitened(rows, totals)
    rank = (~empty).sum(-1).double()
    target = rank.clamp_min(1).log() * max(1.0, power / 2)
    weights, _ = weighted_leverage(basis, empty, totals)
    real = weights > 0
    log = weights.where(real, 1.0).log()
    steps = 0
    while True:
        tau, doubt = weighted_leverage(basis, empty, totals, torch.where(real, ((1 - 2 / power) * log).exp(), 0.0))
        sound = doubt <= MAX_DOUBT
        log_tau = torch.where(real, tau.clamp_min(torch.finfo(tau.dtype).tiny), 1.0).log()
        bounds = power / 2 * log_tau
        if power < 2:
            worst = totals.max(row_maximum(torch.where(real, bounds - log, -torch.inf))).nan_to_num(neginf=0.0)
            following, bounds = bounds, bounds + (2 - power) / power * worst
        else:
            total = totals.logsumexp(log.where(real, -torch.inf).logsumexp(-1, keepdim=True))
            following = (1 - 2 / power) * log + log_tau
            bounds = bounds + (power / 2 - 1) * total.nan_to_num(neginf=0.0)
        reached = totals.logsumexp(bounds.where(real, -torch.inf).logsumexp(-1))
        excess = torch.where(rank > 0, (reached - target).expm1(), 0.0).where(sound, torch.inf)
        steps += 1
        # All processes must stop together, even if their last bits differ.
        unfinished = totals.max((~(excess <= TOLERANCE * max(1.0, power / 2)) & sound).any().double())
        if steps == MAX_STEPS or not bool(unfinished):
            break
        log = torch.where(sound.unsqueeze(-1), following, log)
    bounds = torch.where(sound.unsqueeze(-1), bounds.clamp_max(0.0), 0.0).exp()
    return Lewis(torch.where(real, log.exp(), 0.0), bounds.where(real, 0.0), excess, steps)
