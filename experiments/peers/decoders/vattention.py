"""vAttention: the best keys, and a sample of the others whose size meets an error bound. Ours, after the paper.

A query keeps the first keys, the latest and its `top` best ones; of the n_s others it draws `base`, estimates mean and
spread of their weights exp(s), and then draws enough keys that the sum of all weights is right up to a factor
1 +- epsilon with probability 1 - delta, by the central limit theorem:

    b = (z_(1 - delta / 2) n_s sigma / (epsilon D))^2,   D the estimated sum of all weights.

Drawn keys weigh n_s / b. All scores are computed to find the best keys, which the paper leaves to an index; kept and
drawn keys count as slots, that search does not.

Source: Desai et al., "vAttention: Verified Sparse Attention" (arXiv 2510.05688), section 4.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from statistics import NormalDist

import torch
from experiments.decoders.attend import Look
from torch import Tensor

CHUNK = 128


@dataclass(frozen=True)
class VAttention:
    """`top`, `recent`: numbers of keys; `base`: the least number of drawn keys."""

    top: int
    epsilon: float = 0.1
    delta: float = 0.1
    recent: int = 32
    base: int = 16
    sinks: int = 4

    def __call__(self, query: Tensor, key: Tensor, value: Tensor) -> Iterator[Look]:
        generator = torch.Generator().manual_seed(0)
        for start in range(0, key.shape[1], CHUNK):
            stop = min(start + CHUNK, key.shape[1])
            score = query[:, :, start:stop] @ key[:, None, :stop].mT
            place, now = torch.arange(stop), torch.arange(start, stop)[:, None]
            past = place <= now
            kept = (past & ((place < self.sinks) | (place > now - self.recent))).expand(score.shape)
            rest = score.masked_fill(kept | ~past, -torch.inf)
            best = rest.topk(min(self.top, stop), -1).indices
            kept = (kept | torch.zeros_like(kept).scatter(-1, best, True)) & past
            level = score.masked_fill(~past, -torch.inf).logsumexp(-1, keepdim=True)
            weight = (score - level).exp()
            others = past & ~kept
            drawn, many = self._draw(weight, kept, others, generator)
            scale = others.sum(-1, keepdim=True) / many.clamp_min(1)
            logit = (score + scale.clamp_min(1e-30).log()).masked_fill(~drawn, -torch.inf)
            yield Look(start, stop, kept, many.squeeze(-1), logit, value[:, :stop])

    def _draw(self, weight: Tensor, kept: Tensor, others: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Which of the other keys are drawn, without replacement, and how many (..., 1)."""
        turn = torch.rand(weight.shape, generator=generator).masked_fill(~others, torch.inf)
        rank = turn.argsort(-1).argsort(-1)
        total = others.sum(-1, keepdim=True)
        first = (rank < self.base) & others
        few = first.sum(-1, keepdim=True).clamp_min(2)
        mean = (weight * first).sum(-1, keepdim=True) / few
        spread = ((weight - mean).square() * first).sum(-1, keepdim=True) / (few - 1)
        sum_ = (weight * kept).sum(-1, keepdim=True) + total * mean
        z = NormalDist().inv_cdf(1 - self.delta / 2)
        wanted = (z * total / (self.epsilon * sum_.clamp_min(1e-30))).square() * spread
        many = torch.minimum(wanted.ceil().clamp_min(self.base), total.float()).long()
        return (rank < many) & others, many
