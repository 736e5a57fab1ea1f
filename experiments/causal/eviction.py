"""Caches that evict key by key: what each token still finds in a memory of so many slots.

Played step by step over a whole sequence. A token takes a free slot; where there is none, of the keys that are not
among the latest the one of smallest account is let go for ever. An account says, after each step, what every slot is
worth.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import normalize


class Account(Protocol):
    """What slots are worth, (B, Hkv, S), after a token has attended to them.

    `worth`: before, zero for the token itself; `query` (B, Hkv, G, D), scaled; `key` (B, Hkv, S, D); `used`: no free
    slot.
    """

    def __call__(self, worth: Tensor, query: Tensor, key: Tensor, used: Tensor) -> Tensor: ...


def attention_so_far(worth: Tensor, query: Tensor, key: Tensor, used: Tensor) -> Tensor:
    """All weights that a key got since it came, over the query heads that read it (Zhang et al., "H2O", 2023)."""
    scores = (query @ key.mT).masked_fill(~used.unsqueeze(2), -torch.inf)
    return worth + scores.softmax(-1).sum(2)


def unlikeness(worth: Tensor, query: Tensor, key: Tensor, used: Tensor) -> Tensor:
    """Minus the cosine to the mean direction of the keys that are held (Park et al., "KeyDiff", 2025)."""
    direction = normalize(key, dim=-1) * used.unsqueeze(-1)
    return -(direction @ normalize(direction.sum(2), dim=-1).unsqueeze(-1)).squeeze(-1)


def held(query: Tensor, key: Tensor, slots: int, account: Account) -> Iterator[Tensor]:
    """For every token the positions (B, Hkv, S) of the keys it attends to, its own among them; -1: a free slot.

    query (B, Hq, N, D), scaled; key (B, Hkv, N, D). Half of the slots are the latest keys. Cost O(N slots D).
    """
    batch, heads, tokens, _ = key.shape
    query = query.unflatten(1, (heads, -1))
    size, recent = min(slots, tokens), slots // 2
    place = torch.full((batch, heads, size), -1)
    worth = torch.zeros(batch, heads, size)
    for now in range(tokens):
        if now < size:
            spot = torch.full((batch, heads, 1), now)
        else:
            old = place <= now - recent
            spot = worth.masked_fill(~old, torch.inf).argmin(-1, keepdim=True)
        place, worth = place.scatter(-1, spot, now), worth.scatter(-1, spot, 0.0)
        index = place.clamp_min(0).unsqueeze(-1).expand(-1, -1, -1, key.shape[-1])
        worth = account(worth, query[:, :, :, now], key.gather(2, index), place >= 0)
        yield place
