"""Parts that several rivals share: attention in parts that can be merged, weighted lists of keys, clusters.

Each is a few operations of torch on whole tensors. `partial` is torch's fused attention, so that the attention of a
rival is as fast as exact attention; selection is made of matrix products, sorting and gathering.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention


class Attend(Protocol):
    """(B, H, N, Dv) from query (B, H, N, D), key (B, H, M, D) and value (B, H, M, Dv), all of them visible."""

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, *, scale: float, is_causal: bool, generator: torch.Generator, **more: Any
    ) -> Tensor: ...


def check_encoder(is_causal: bool) -> None:
    """Raise `ValueError` for a causal problem, which the rival's paper does not treat."""
    if is_causal:
        raise ValueError("is_causal: expected False, the case of the paper, got True")


def partial(q: Tensor, k: Tensor, v: Tensor, scale: float, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Attention over a part of the keys, and the logarithm of the sum of its weights (B, H, N). Fused, float32, D = Dv.

    `bias` (B or 1, H or 1, N or 1, M) is added to the scores. Where it hides every key, the output is 0 and the
    logarithm -inf.
    """
    fused = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    out, total = fused(q, k, v, 0.0, False, attn_mask=bias, scale=scale)
    if bias is not None:
        none = (bias == -torch.inf).all(-1).expand(total.shape)
        total = total.masked_fill(none, -torch.inf)
    return out, total


def merge(parts: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    """Attention over all keys of the parts, from each part's output and logarithm of its sum."""
    share = torch.stack([total for _, total in parts]).softmax(0).unsqueeze(-1)
    merged = parts[0][0] * share[0]
    for (out, _), weight in zip(parts[1:], share[1:], strict=True):
        merged = torch.addcmul(merged, out, weight)
    return merged


def rows(x: Tensor, index: Tensor) -> Tensor:
    """x (B, H, N, D) at index (B, H, M): (B, H, M, D)."""
    return x.gather(2, index.unsqueeze(-1).expand(-1, -1, -1, x.shape[-1]))


def listed(q: Tensor, k: Tensor, v: Tensor, index: Tensor, scale: float) -> Tensor:
    """Attention to the keys of one list (B, H, M) for all queries of a head, renormalised."""
    return scaled_dot_product_attention(q, rows(k, index), rows(v, index), scale=scale)


def ratio(q: Tensor, k: Tensor, above: Tensor, below: Tensor, scale: float) -> Tensor:
    """`sum_j exp(s_ij) above_j / sum_j exp(s_ij) below_j`, below (B, H, M): fused, with a column more."""
    width = max(k.shape[-1], above.shape[-1] + 1)
    value = pad(torch.cat([above, below.unsqueeze(-1)], -1), (0, width - above.shape[-1] - 1))
    q, k = (pad(x, (0, width - x.shape[-1])) for x in (q, k))
    both = scaled_dot_product_attention(q, k, value, scale=scale)
    bottom = both[..., above.shape[-1] : above.shape[-1] + 1]
    return both[..., : above.shape[-1]] / bottom.where(bottom.abs() > 1e-30, torch.full_like(bottom, torch.inf))


def nearest(x: Tensor, means: Tensor) -> Tensor:
    """The nearest of means (B, H, C, D) to every row of x (B, H, N, D): (B, H, N)."""
    return (means.square().sum(-1).unsqueeze(2) - 2 * x @ means.mT).argmin(-1)


def averages(x: Tensor, cluster: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The mean (B, H, C, D) of the rows of x in every cluster, zero for an empty one, and the sizes (B, H, C)."""
    size = torch.zeros(*cluster.shape[:2], count).scatter_add_(2, cluster, torch.ones(cluster.shape))
    total = torch.zeros(*cluster.shape[:2], count, x.shape[-1])
    total.scatter_add_(2, cluster.unsqueeze(-1).expand(x.shape), x)
    return total / size.clamp_min(1).unsqueeze(-1), size


def k_means(x: Tensor, count: int, rounds: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Lloyd's algorithm from rows drawn at random: the cluster of every row (B, H, N) and the means (B, H, C, D)."""
    start = torch.rand(x.shape[:3], generator=generator).topk(count, -1).indices
    means = rows(x, start)
    for _ in range(rounds):
        fresh, size = averages(x, nearest(x, means), count)
        means = torch.where(size.unsqueeze(-1) > 0, fresh, means)
    return nearest(x, means), means
