"""Inputs constructed to break plans, and a search for worse ones by gradient ascent on the error of the output."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

import fewkeys as fk
from fewkeys.metrics import relative_error

DIM = 64
Rows = tuple[Tensor, Tensor, Tensor]
"""Query, key and value, each (1, 1, N, D)."""


def normal(count: int, draw: torch.Generator) -> Rows:
    """Independent normal numbers: scores have variance one, and no key matters much."""
    query, key, value = torch.randn(3, 1, 1, count, DIM, generator=draw)
    return query, key, value


def one_key_each(count: int, draw: torch.Generator) -> Rows:
    """Each query points at another key at a random position, so queries cannot share a list of keys."""
    _, key, value = normal(count, draw)
    return 2 * key[:, :, torch.randperm(count, generator=draw)], key, value


def few_needles(count: int, draw: torch.Generator) -> Rows:
    """Two of a hundred queries point at one key each, and the others at none: a sample misses them."""
    query, key, value = normal(count, draw)
    asking = torch.randperm(count, generator=draw)[: max(1, count // 50)]
    query[:, :, asking] = 3 * key[:, :, torch.randperm(count, generator=draw)[: len(asking)]]
    return query, key, value


def opposite_values(count: int, draw: torch.Generator) -> Rows:
    """Neighbouring keys are nearly equal and their values nearly cancel: the exact output is small."""
    query, key, value = normal(count, draw)
    pair = torch.arange(count) // 2 * 2
    key = key[:, :, pair] + 0.1 * torch.randn(key.shape, generator=draw)
    sign = 1 - 2 * (torch.arange(count) % 2)
    return query, key, value[:, :, pair] * sign[:, None] + 0.05 * value


def large_values(count: int, draw: torch.Generator) -> Rows:
    """Eight values are a thousand times as long as the others, at keys with ordinary scores."""
    query, key, value = normal(count, draw)
    value[:, :, torch.randperm(count, generator=draw)[:8]] *= 1000
    return query, key, value


def drifting_keys(count: int, draw: torch.Generator) -> Rows:
    """Keys drift by forty times their spread in a direction that queries do not see: codes spend their bits on it."""
    query, key, value = one_key_each(count, draw)
    query[..., 0] = 0
    key[..., 0] = 40 * torch.linspace(0, 1, count)
    return query, key, value


def large_channel(count: int, draw: torch.Generator) -> Rows:
    """One channel of all keys is +-50, and queries do not see it: codes spend their bits on it."""
    query, key, value = one_key_each(count, draw)
    query[..., 0] = 0
    key[..., 0] = 50 * (1 - 2 * torch.randint(2, (count,), generator=draw)).float()
    return query, key, value


MADE: dict[str, Callable[[int, torch.Generator], Rows]] = {
    "normal numbers": normal,
    "one key for each query": one_key_each,
    "needles for 2 % of queries": few_needles,
    "values that cancel": opposite_values,
    "eight large values": large_values,
    "keys that drift": drifting_keys,
    "a large channel": large_channel,
}
STARTS = ("normal numbers", "one key for each query")
"""Where the search begins."""


@dataclass(frozen=True)
class Search:
    """Adam on query, key and value, whose rows keep their lengths, for the mean relative error of the output."""

    steps: int = 150
    rate: float = 0.05

    def __call__(self, plan: fk.Plan, rows: Rows, is_causal: bool) -> Rows:
        """The inputs of largest error of all steps."""
        lengths = [part.norm(dim=-1, keepdim=True) for part in rows]
        leaves = [part.clone().requires_grad_() for part in rows]
        adam = torch.optim.Adam(leaves, lr=self.rate)
        worst, best = -1.0, rows
        for _ in range(self.steps):
            now = [part / part.norm(dim=-1, keepdim=True) * size for part, size in zip(leaves, lengths, strict=True)]
            error = error_of(plan, (now[0], now[1], now[2]), is_causal).mean()
            if error.item() > worst:
                query, key, value = (part.detach().clone() for part in now)
                worst, best = error.item(), (query, key, value)
            adam.zero_grad()
            (-error).backward()
            adam.step()
        return best


def error_of(plan: fk.Plan | None, rows: Rows, is_causal: bool) -> Tensor:
    """The relative error (B, H, N) of a plan's output."""
    exact = fk.attention(*rows, is_causal=is_causal)
    draw = torch.Generator().manual_seed(0)
    return relative_error(fk.attention(*rows, plan=plan, is_causal=is_causal, generator=draw), exact)
