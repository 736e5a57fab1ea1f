"""Key selection under causality, token by token: every query keeps the r best keys of its own past.

`fewkeys` selects anew once per 64 tokens, which says nothing about sequences as short as those of this experiment.
Quadratic, for comparisons only.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fewkeys.core.weights import Weights


def keep_best(scores: Tensor, importance: Tensor, kernel: Weights, r: int) -> Tensor:
    """Attention weights on the r visible keys of largest importance.

    scores (B, H, N, N), -inf where hidden; importance (B, H, N) of a key, or (B, H, N, N) of a key for a query.
    """
    rows = importance[:, :, None] if importance.ndim == 3 else importance
    rows = rows.expand(scores.shape).masked_fill(scores == -torch.inf, -torch.inf)
    best = rows.topk(min(r, scores.shape[-1]), -1).indices
    kept = torch.zeros_like(scores, dtype=torch.bool).scatter(-1, best, True)
    return kernel.normalised(scores.masked_fill(~kept, -torch.inf))


def prefix_leverage(key: Tensor) -> Tensor:
    """`k_j^T (K_i^T K_i)^+ k_j`, K_i the keys up to i: (B, H, N, D) -> (B, H, N, N), rows i. Meaningful for j <= i."""
    found = []
    for keys in key.double().flatten(0, 1):
        gram = (keys[:, :, None] * keys[:, None]).cumsum(0)
        # A ridge in place of the pseudo-inverse: while the past spans too little, scores of one are told apart by it.
        ridge = 1e-6 * gram.diagonal(dim1=1, dim2=2).mean(1).clamp_min(1e-30)
        factor = torch.linalg.cholesky(gram + ridge[:, None, None] * torch.eye(keys.shape[1], dtype=keys.dtype))
        white = torch.linalg.solve_triangular(factor, keys.T.expand(len(keys), -1, -1), upper=False)
        found.append(white.square().sum(1))
    return torch.stack(found).view(*key.shape[:2], key.shape[2], key.shape[2])
