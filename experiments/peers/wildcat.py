"""WildCat: a weighted coreset of keys. Our implementation after the paper.

Keys are centred (softmax does not change) and cut into bins. In each, randomly pivoted Cholesky of the kernel
`h(k, k') = exp(scale <k, k'> / tau^2)` chooses pivots S, key j with a chance proportional to what is left of `h(j, j)`,
and Nystrom weights `W = h(S, S)^-1 h(S, all)` spread all keys over them:

    o_i = sum_s exp(scale <q_i, k_s>) (W v)_s / sum_s exp(scale <q_i, k_s>) (W 1)_s,   clipped to the range of v.

tau^2 is `temperature` times the ratio of the longest centred key to the longest query, which makes the two equally
long; the paper has a formula for it, here it is searched. Cost O(n (r D + r^2 / bins)).

Source: Schroeder, Mackey, "WildCat: Near-Linear Attention in Theory and Practice" (arXiv 2602.10056), sections 2, 3.
"""

from __future__ import annotations

from itertools import product
from typing import Any

import torch
from experiments.peers.parts import check_encoder, ratio, rows
from torch import Tensor

MOST = 2**28
"""The most multiply-adds of a head's factor: with more, exact attention was always faster."""


def attend(
    q: Tensor, k: Tensor, v: Tensor, *, scale: float, is_causal: bool, generator: torch.Generator,
    rank: int, bins: int = 1, temperature: float = 1.0,
) -> Tensor:  # fmt: skip
    """Attention over `rank` weighted keys, as many from each of the `bins`, which must divide rank and keys."""
    check_encoder(is_causal)
    heads, count = k.shape[:2], k.shape[2]
    if count % bins or rank % bins:
        raise ValueError(f"bins: expected a divisor of {count} keys and rank {rank}, got {bins}")
    key = k - k.mean(2, keepdim=True)
    longest = (key.norm(dim=-1).amax(-1) / q.norm(dim=-1).amax(-1).clamp_min(1e-6)).clamp_min(1e-6)
    sharpness = (scale / (temperature * longest)).repeat_interleave(bins, 1)
    cut = key.unflatten(2, (bins, -1)).flatten(1, 2)
    pivots, factor = cholesky(cut, sharpness, min(rank, count) // bins, generator)
    chosen = rows(cut, pivots)
    value = torch.cat([v, torch.ones(*v.shape[:3], 1)], -1).unflatten(2, (bins, -1)).flatten(1, 2)
    core = factor.gather(2, pivots.unsqueeze(-1).expand(-1, -1, -1, factor.shape[-1]))
    mixed = torch.linalg.solve_triangular(core.mT, factor.mT @ value, upper=True)
    chosen, mixed = (x.unflatten(1, (heads[1], bins)).flatten(2, 3) for x in (chosen, mixed))
    out = ratio(q, chosen, mixed[..., :-1], mixed[..., -1], scale)
    return out.clamp(v.amin(2, keepdim=True), v.amax(2, keepdim=True))


def cholesky(key: Tensor, sharpness: Tensor, rank: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Pivots (B, H, r), and the factor F (B, H, N, r) of `h ~ F F^T`, lower triangular at the pivots.

    `sharpness` (B, H) is the factor in h's exponent. h is scaled as a whole, which leaves the weights unchanged and
    avoids overflow. Chen, Epperly, Tropp, Webber, "Randomly pivoted Cholesky" (2022), algorithm 2.
    """
    level = sharpness[..., None] * key.square().sum(-1)
    top = level.amax(-1, keepdim=True)
    left = (level - top).exp()
    start = left.sum(-1, keepdim=True)
    factor = torch.zeros(*key.shape[:3], rank)
    pivots = torch.zeros(*key.shape[:2], rank, dtype=torch.int64)
    for step in range(rank):
        # Where nothing is left, any key will do: its column is zero elsewhere.
        chance = left + 1e-12 * start
        pivot = torch.multinomial(chance.flatten(0, 1), 1, generator=generator).view(*key.shape[:2], 1)
        pivots[..., step : step + 1] = pivot
        column = (sharpness[..., None] * (key @ rows(key, pivot).mT).squeeze(-1) - top).exp()
        if step:
            pivot_row = rows(factor[..., :step], pivot)
            column = column - (factor[..., :step] @ pivot_row.mT).squeeze(-1)
        size = column.gather(-1, pivot)
        sound = size > 1e-6 * start / key.shape[2]
        column = torch.where(sound, column / size.clamp_min(1e-30).sqrt(), torch.zeros_like(column))
        column.scatter_(-1, pivot, torch.where(sound, size.clamp_min(0).sqrt(), torch.ones_like(size)))
        factor[..., step] = column
        left = (left - column.square()).clamp_min(0).scatter(-1, pivot, 0.0)
    return pivots, factor


def grid(queries: int, keys: int, dim: int) -> list[dict[str, Any]]:
    """The settings to search."""
    ranks = [rank for rank in (16, 32, 64, 128, 256, 512) if rank <= keys // 2]
    bins = [bins for bins in (1, 4, 16, 64) if keys % bins == 0]
    return [
        {"rank": rank, "bins": cut, "temperature": temperature}
        for rank, cut, temperature in product(ranks, bins, (1.0, 2.0, 4.0, 8.0))
        if rank >= 4 * cut and keys * rank**2 <= MOST * cut
    ]
