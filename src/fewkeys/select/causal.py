"""Strictly causal selection of the heaviest keys of the past.

Tokens come in blocks of absolute positions. When a block of keys is complete, the keys kept so far and the new ones are
scored together and the best `count` stay; evicted keys never return. The queries of the next block share this list.
While fewer than `count` keys are complete, the free places go to the block's own keys in order, under the causal mask:
a budget of all keys is exact attention. Cost O(n (count + block)) scores, memory independent of n besides the lists.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from fewkeys.core.graph import Columns, Graph
from fewkeys.core.inputs import Inputs
from fewkeys.core.precision import working
from fewkeys.core.rows import take

CAUSAL_BLOCK = 32
"""Tokens of a block."""


class OnlineScore(ABC):
    """Scores of keys that arrive block by block; a selector makes a fresh one for every call."""

    @abstractmethod
    def offer(self, key: Tensor, real: Tensor | None) -> Tensor:
        """Include a block of keys (B, Hkv, M, D), of which `real` (B, M) count; the result (B, Hkv, M) is stored with
        them.
        """

    def score(self, key: Tensor, number: Tensor) -> Tensor:
        """The present scores (B, Hkv, M) of keys offered earlier; `number`: what `offer` returned for them."""
        return number


@dataclass(frozen=True, eq=False)
class HeldKeys:
    """The best keys so far, (B, Hkv, K): places, which are used, and what `OnlineScore.offer` returned."""

    index: Tensor
    used: Tensor
    number: Tensor

    @staticmethod
    def empty(key: Tensor) -> HeldKeys:
        """None yet of keys (B, Hkv, N, D)."""
        index = torch.zeros((*key.shape[:2], 0), dtype=torch.int64, device=key.device)
        return HeldKeys(index, index.bool(), key.new_zeros(index.shape))

    def with_block(self, index: Tensor, used: Tensor, number: Tensor) -> HeldKeys:
        pairs = (self.index, index), (self.used, used), (self.number, number)
        return HeldKeys(*(torch.cat(pair, -1) for pair in pairs))

    def best(self, score: Tensor, count: int) -> HeldKeys:
        """The `count` keys of largest `score` (B, Hkv, K), in the order in which they came."""
        place = score.masked_fill(~self.used, -torch.inf).topk(count, -1).indices.sort(-1).values
        return HeldKeys(*(part.gather(-1, place) for part in (self.index, self.used, self.number)))


def running_top(inputs: Inputs, score: OnlineScore, count: int) -> Graph:
    """The graph in which every block of queries keeps the `count` best of the keys before it."""
    x, size = inputs, CAUSAL_BLOCK
    count = min(count, x.keys)
    keys = working(x.key.detach())
    held, lists, done = HeldKeys.empty(keys), [], 0
    for block in range(x.offset // size, (x.offset + x.queries - 1) // size + 1):
        complete = min(block * size, x.keys)
        while done < complete:
            held = _offer(x, keys, score, held, done, count)
            done = min(done + size, complete)
        lists.append(_filled(x, held, complete, count))
    index, used = (torch.stack(parts, 2) for parts in zip(*lists, strict=True))
    return Graph(x, columns=Columns(index, used, size))


def _offer(x: Inputs, keys: Tensor, score: OnlineScore, held: HeldKeys, start: int, count: int) -> HeldKeys:
    stop = min(start + CAUSAL_BLOCK, x.keys)
    new = torch.arange(start, stop, device=keys.device).expand(x.batch, x.kv_heads, -1)
    real = None if x.valid is None else x.valid[:, start:stop]
    number = score.offer(keys[:, :, start:stop], real)
    used = torch.ones_like(new, dtype=torch.bool) if real is None else real[:, None].expand_as(new)
    held = held.with_block(new, used, number)
    if held.index.shape[-1] <= count:
        return held
    return held.best(score.score(take(keys, held.index), held.number), count)


def _filled(x: Inputs, held: HeldKeys, complete: int, count: int) -> tuple[Tensor, Tensor]:
    """The list of `count` keys, its free places given to the block's own real keys, in order; and which are used."""
    last_keys = torch.arange(complete, complete + CAUSAL_BLOCK, device=held.index.device)
    real = (last_keys < x.keys).expand(x.batch, -1)
    last_keys = last_keys.clamp_max(x.keys - 1).expand(x.batch, -1)
    if x.valid is not None:
        real = real & x.valid.gather(-1, last_keys)
        order = real.to(torch.int8).argsort(dim=-1, descending=True, stable=True)
        last_keys, real = last_keys.gather(-1, order), real.gather(-1, order)
    free = count - held.index.shape[-1]
    own = (pad(rows, (0, free - CAUSAL_BLOCK))[:, None].expand(-1, x.kv_heads, -1) for rows in (last_keys, real))
    index, used = (torch.cat(parts, -1) for parts in zip((held.index, held.used), own, strict=True))
    return index, used
