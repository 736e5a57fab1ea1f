"""Strictly causal selection of the heaviest keys of the past.

Queries are taken in blocks of absolute positions. A block's list is chosen among the keys that were complete before
the block began, by scores that saw nothing later: each time a block of keys is complete, the keys kept so far and the
new ones are scored together and the best `count` stay; evicted keys never return. While fewer than `count` keys are
complete, the free places of the list go to the block's own keys in order, under the causal mask; so a budget of all
keys is exact attention. Cost O(n (count + block)) scores, memory independent of n besides the lists.
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

CAUSAL_BLOCK = 32
"""Queries that share one list of causally chosen keys: the list is renewed at every such block."""


class OnlineScore(ABC):
    """Scores of keys that arrive block by block; a selector makes a fresh one for every call.

    `sums` is all that is remembered of the keys so far: statistics that add up, by name.
    """

    def __init__(self) -> None:
        self.sums: dict[str, Tensor] = {}

    @abstractmethod
    def offer(self, key: Tensor, real: Tensor | None) -> Tensor:
        """Include a block of keys (B, Hkv, M, D), of which `real` (B, M) count; return a number for each of them,
        (B, Hkv, M), that is stored with the key.
        """

    def score(self, key: Tensor, number: Tensor) -> Tensor:
        """The present scores (B, Hkv, M) of keys offered earlier, with their numbers. Here: the numbers."""
        return number

    def add(self, sums: dict[str, Tensor]) -> None:
        """Include further keys by their sums."""
        self.sums = {name: self.sums[name] + part if self.sums else part for name, part in sums.items()}


@dataclass(frozen=True, eq=False)
class HeldKeys:
    """The best keys so far: `index` (B, Hkv, K) has positions; `used` and `number` (same shape) belong to them."""

    index: Tensor
    used: Tensor
    number: Tensor

    @staticmethod
    def empty(key: Tensor) -> HeldKeys:
        """Nothing yet, for keys (B, Hkv, N, D)."""
        index = torch.zeros((*key.shape[:2], 0), dtype=torch.int64, device=key.device)
        return HeldKeys(index, index.bool(), index.to(working(key).dtype))

    def joined(self, index: Tensor, used: Tensor, number: Tensor) -> HeldKeys:
        """With further candidates."""
        return HeldKeys(
            torch.cat([self.index, index], -1), torch.cat([self.used, used], -1), torch.cat([self.number, number], -1)
        )

    def best(self, score: Tensor, count: int) -> Tensor:
        """Places (B, Hkv, count) of the best candidates by `score` (B, Hkv, K), in the order in which they came."""
        return score.masked_fill(~self.used, -torch.inf).topk(count, -1).indices.sort(-1).values

    def take(self, place: Tensor) -> HeldKeys:
        """The candidates at `place`."""
        return HeldKeys(self.index.gather(-1, place), self.used.gather(-1, place), self.number.gather(-1, place))


def running_top(inputs: Inputs, score: OnlineScore, count: int) -> Graph:
    """The graph in which every block of queries keeps the `count` best keys of its completed past."""
    x, size = inputs, CAUSAL_BLOCK
    count = min(count, x.keys)
    keys = working(x.key.detach())
    held, lists, flags, done = HeldKeys.empty(keys), [], [], 0
    for block in range(x.offset // size, (x.offset + x.queries - 1) // size + 1):
        complete = min(block * size, x.keys)
        while done < complete:
            held = _offer(x, keys, score, held, done, count)
            done = min(done + size, complete)
        index, flag = _fill(x, held, complete, count)
        lists.append(index)
        flags.append(flag)
    return Graph(x, columns=Columns(torch.stack(lists, 2), torch.stack(flags, 2), size))


def _offer(x: Inputs, keys: Tensor, score: OnlineScore, held: HeldKeys, start: int, count: int) -> HeldKeys:
    stop = min(start + CAUSAL_BLOCK, x.keys)
    new = torch.arange(start, stop, device=keys.device).expand(x.batch, x.kv_heads, -1)
    real = None if x.valid is None else x.valid[:, start:stop]
    number = score.offer(keys[:, :, start:stop], real)
    used = torch.ones_like(new, dtype=torch.bool) if real is None else real[:, None].expand_as(new)
    held = held.joined(new, used, number)
    if held.index.shape[-1] <= count:
        return held
    rows = keys.gather(-2, held.index.unsqueeze(-1).expand(-1, -1, -1, keys.shape[-1]))
    return held.take(held.best(score.score(rows, held.number), count))


def _fill(x: Inputs, held: HeldKeys, complete: int, count: int) -> tuple[Tensor, Tensor]:
    """The list with its free places given to the block's own real keys, in order; lists are `count` long."""
    last_keys = torch.arange(complete, complete + CAUSAL_BLOCK, device=held.index.device)
    real = (last_keys < x.keys).expand(x.batch, -1)
    last_keys = last_keys.clamp_max(x.keys - 1).expand(x.batch, -1)
    if x.valid is not None:
        real = real & x.valid.gather(-1, last_keys)
        order = real.to(torch.int8).argsort(dim=-1, descending=True, stable=True)
        last_keys, real = last_keys.gather(-1, order), real.gather(-1, order)
    free = count - held.index.shape[-1]
    missing = max(0, free - CAUSAL_BLOCK)
    last_keys, real = pad(last_keys, (0, missing))[:, :free], pad(real, (0, missing))[:, :free]
    shape = (-1, x.kv_heads, -1)
    return (
        torch.cat([held.index, last_keys[:, None].expand(shape)], -1),
        torch.cat([held.used, real[:, None].expand(shape)], -1),
    )
