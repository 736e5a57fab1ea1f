"""HyperAttention as a dense matrix: sorted LSH blocks kept exactly, the rest estimated from a uniform sample."""

from __future__ import annotations

import torch
from torch import Tensor

from fewkeys.core.weights import Weights, positive

PLANES = 7
"""Random hyperplanes of the hash, as in the published code: 128 buckets."""


def hyper_weights(
    query: Tensor, key: Tensor, scores: Tensor, kernel: Weights, r: int, is_causal: bool, generator: torch.Generator
) -> Tensor:
    """Attention weights (B, H, N, N) that touch at most r keys per row.

    Queries and keys are hashed by the signs of random projections, sorted along the Gray code of their hashes
    (neighbours differ in one sign), and cut into blocks; a query keeps the keys of the block at its own rank. m keys
    drawn uniformly, the same for all queries of a head, speak for the others: with u keys outside the block, of which
    the sample holds s, each sampled one gets the weight of u / s.

    scores (B, H, N, N) are scaled, -inf where hidden. Half of the r slots are the block, half the sample. Under
    causality one more slot is the query itself, and hidden keys leave blocks and samples; the published recursion over
    halves of the sequence cannot be had for r slots. The blocks then depend on later tokens: a bound, not a method.

    Source: Han, Jayaram, Karbasi, Mirrokni, Woodruff, Zandieh, HyperAttention (arXiv 2310.05869), sections 2 and 3.
    """
    count = key.shape[2]
    own = int(is_causal)
    block = (r + 1 - own) // 2
    sampled = min(r - own - block, count)
    visible = scores > -torch.inf
    kept = torch.eye(count, dtype=torch.bool).expand(scores.shape) if own else torch.zeros_like(visible)
    if block:
        planes = torch.randn(key.shape[1], key.shape[3], PLANES, generator=generator)
        place = _rank(query, planes) // block
        kept = kept | (place[..., :, None] == (_rank(key, planes) // block)[..., None, :])
    drawn = torch.zeros(key.shape[:3], dtype=torch.bool)
    if sampled:
        drawn.scatter_(-1, torch.rand(key.shape[:3], generator=generator).topk(sampled, -1).indices, True)
    spoken = drawn[:, :, None] & visible & ~kept
    left = (visible & ~kept).sum(-1, keepdim=True)
    share = left / spoken.sum(-1, keepdim=True).clamp_min(1)
    (weights,) = kernel.kernel([scores.masked_fill(~(kept | spoken), -torch.inf)])
    weights = torch.where(spoken, weights * share, weights)
    return weights / positive(weights.sum(-1, keepdim=True))


def _rank(vectors: Tensor, planes: Tensor) -> Tensor:
    """The rank (B, H, N) of each vector in the order of the Gray codes of its signs."""
    signs = (vectors @ planes) > 0
    digits = signs.cumsum(-1) % 2  # from Gray code to binary: every digit is the parity of those before it
    code = (digits * 2 ** torch.arange(PLANES - 1, -1, -1)).sum(-1)
    return code.argsort(dim=-1, stable=True).argsort(-1)
