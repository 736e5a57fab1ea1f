"""The loss of a projection: gold keys should be near, other keys far.

For query i with gold keys P and as many other keys N, drawn at random,

    loss_i = max(0, margin + sum_P |q'_i - k'_j|^2 - sum_N |q'_i - k'_j|^2)

(Treviso et al., arXiv 2109.12188, section 3.2; the hinge is on the sums). With signs s_ij = 1 on P and -|P| / |N| on N
that add up to zero, |q'_i|^2 cancels and `loss_i = max(0, margin + sum_j s_ij |k'_j|^2 - 2 q'_i . sum_j s_ij k'_j)`: no
n x n tensor carries a gradient.
"""

from __future__ import annotations

import torch
from torch import Tensor


def signs(gold: Tensor, seen: Tensor, generator: torch.Generator) -> Tensor:
    """1 at gold edges, minus their share at random others that are seen: (B, H, N, M) float32, rows adding up to 0.

    `gold` bool (B, H, N, M), `seen` bool, broadcastable to it. A row has as many others as gold keys. With fewer
    others, each counts proportionally more; without any, the row is zero. Cost O(N M log M).
    """
    others = seen & ~gold
    gold_count, other_count = gold.sum(-1), others.sum(-1)
    number = torch.minimum(gold_count, other_count)
    draw = torch.rand(gold.shape, generator=generator).masked_fill_(~others, -1.0)
    index = draw.topk(int(number.max()), -1).indices
    rate = (gold_count / number.clamp_min(1)).unsqueeze(-1)
    drawn = torch.arange(index.shape[-1]) < number.unsqueeze(-1)
    result = gold.float().scatter_add_(-1, index, -(drawn * rate))
    return result.masked_fill_((number == 0).unsqueeze(-1), 0.0)


def hinge(query: Tensor, key: Tensor, sign: Tensor, margin: float) -> Tensor:
    """The loss (B, H, N) of projected queries (B, H, N, r) and keys (B, H, M, r); 0 for rows of `sign` that are 0."""
    size = key.square().sum(-1, keepdim=True)
    sums = sign.to(key.dtype) @ torch.cat([size, key], -1)
    excess = sums[..., 0] - 2 * (query * sums[..., 1:]).sum(-1)
    return (margin + excess).clamp_min(0.0) * has_pairs(sign)


def has_pairs(sign: Tensor) -> Tensor:
    """Which queries have both gold keys and others, (B, H, N)."""
    return (sign != 0).any(-1)
