"""Small implementations after the papers: Quest's pages, Multipole's clusters, caches that evict, any selector.

Each is strictly causal and answers every query of a sequence, those of the prompt included. A query that sees no more
keys than it has slots keeps them all and scores nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from experiments.causal.eviction import Account, held
from experiments.decoders.attend import Look
from torch import Tensor

from fewkeys.select.base import Selector

CHUNK = 128
"""Queries at a time, where the rule has no blocks."""


@dataclass(frozen=True)
class Chosen:
    """What a selector of this package keeps, counted on the data itself."""

    selector: Selector

    def __call__(self, query: Tensor, key: Tensor, value: Tensor) -> Iterator[Look]:
        graph = self.selector.graph(query.flatten(0, 1)[None], key[None], is_causal=True, scale=1.0)
        for start, stop in _chunks(key):
            kept = graph.mask(start, stop)[0, ..., :stop].unflatten(0, query.shape[:2])
            yield Look(start, stop, kept, _none(kept))


@dataclass(frozen=True)
class Evicting:
    """A cache of `slots` keys that evicts keys one by one; half of it holds the latest keys."""

    slots: int
    account: Account

    def __call__(self, query: Tensor, key: Tensor, value: Tensor) -> Iterator[Look]:
        places = held(query.flatten(0, 1)[None], key[None], self.slots, self.account)
        for start, stop in _chunks(key):
            # One more column takes the free slots.
            kept = torch.zeros(len(key), stop - start, stop + 1, dtype=torch.bool)
            for row in range(stop - start):
                kept[:, row].scatter_(-1, next(places)[0] % (stop + 1), True)
            kept = kept[:, None, :, :stop].expand(-1, query.shape[1], -1, -1)
            yield Look(start, stop, kept, _none(kept))


@dataclass(frozen=True)
class Quest:
    """Pages of consecutive keys, bounded coordinate by coordinate (Tang et al., "Quest", 2024).

    A query scores every whole page of its past by `sum_i max(q_i low_i, q_i high_i)`, the highest score that a key
    inside could have. It keeps its own page and the best others, at least one. Each scored page counts as a slot,
    unless `free`, as the paper counts.
    """

    slots: int
    free: bool = False
    page: int = 16

    def __call__(self, query: Tensor, key: Tensor, value: Tensor) -> Iterator[Look]:
        whole = key.shape[1] // self.page
        pages = key[:, : whole * self.page].unflatten(1, (whole, self.page))
        low, high = pages.amin(2).unsqueeze(1), pages.amax(2).unsqueeze(1)
        for start, stop in _chunks(key):
            place = torch.arange(start, stop).unsqueeze(-1)
            page, fits = place // self.page, place < self.slots
            past = torch.arange(whole) < page
            now = query[:, :, start:stop]
            bound = now.clamp_min(0) @ high.mT + now.clamp_max(0) @ low.mT
            room = self.slots - (place % self.page + 1) - (0 if self.free else page)
            opened = _best(bound.masked_fill(~past, -torch.inf), (room // self.page).clamp_min(1)) & past
            kept = opened.repeat_interleave(self.page, -1)
            kept = torch.nn.functional.pad(kept, (0, key.shape[1] - kept.shape[-1]))[..., :stop]
            kept = kept | (torch.arange(stop) // self.page == page) | fits
            yield Look(start, stop, kept, (page * ~fits).squeeze(-1).expand(kept.shape[:-1]))


@dataclass(frozen=True)
class Multipole:
    """Clusters of past keys (Hooper et al., "Multipole Attention", 2025).

    Keys are sealed `block` at a time. Every `size` of them get a new cluster, seeded by one of them, and `rounds`
    rounds of k-means over all sealed keys follow: more rounds and keys than in the paper. A query scores all means.
    It keeps the keys of the best clusters as far as its slots go, at least those of one, and the keys that are not
    sealed. Every other cluster stands in with its mean value and the logit `q . mean key + log count`. Each mean
    counts as a slot, unless `free`.
    """

    slots: int
    free: bool = False
    size: int = 16
    block: int = 32
    rounds: int = 2

    def __call__(self, query: Tensor, key: Tensor, value: Tensor) -> Iterator[Look]:
        mean = key[:, :0]
        for start in range(0, key.shape[1], self.block):
            stop, now = min(start + self.block, key.shape[1]), query[:, :, start : start + self.block]
            mean = torch.cat([mean, key[:, max(0, start - self.block) : start : self.size]], 1)
            if stop <= self.slots:
                kept = torch.ones(*now.shape[:-1], stop, dtype=torch.bool)
                yield Look(start, stop, kept, _none(kept))
                continue
            for _ in range(self.rounds):
                cluster, count = _nearest(key[:, :start], mean)
                mean = torch.where(count > 0, _sums(key[:, :start], cluster, mean) / count.clamp_min(1), mean)
            cluster, count = _nearest(key[:, :start], mean)
            stand_in = _sums(value[:, :start], cluster, mean) / count.clamp_min(1)
            yield self._look(now, start, cluster, count.squeeze(-1), mean, stand_in)

    def _look(self, query: Tensor, start: int, cluster: Tensor, count: Tensor, mean: Tensor, value: Tensor) -> Look:
        """`cluster` (Hkv, T): that of each sealed key; `count` (Hkv, C): their sizes. Empty clusters are left out."""
        tail = torch.arange(1, query.shape[2] + 1)
        score = (query @ mean[:, None].mT).masked_fill((count == 0)[:, None, None], -torch.inf)
        used = (count > 0).sum(-1)[:, None, None].expand(query.shape[:-1])
        room = self.slots - tail - (0 if self.free else used)
        order = score.argsort(dim=-1, descending=True, stable=True)
        sizes = count[:, None, None].expand(score.shape).gather(-1, order).cumsum(-1)
        fits = sizes <= room.unsqueeze(-1)
        fits[..., 0] = True
        opened = torch.zeros_like(fits).scatter(-1, order, fits)
        kept = opened.gather(-1, cluster[:, None, None].expand(*opened.shape[:-1], -1))
        kept = torch.nn.functional.pad(kept, (0, query.shape[2]), value=True)
        logit = (score + count.clamp_min(1).log()[:, None, None]).masked_fill(opened, -torch.inf)
        return Look(start, start + query.shape[2], kept, used, logit, value)


def _chunks(key: Tensor) -> Iterator[tuple[int, int]]:
    for start in range(0, key.shape[1], CHUNK):
        yield start, min(start + CHUNK, key.shape[1])


def _none(kept: Tensor) -> Tensor:
    """No query of the mask scores a mean."""
    return torch.zeros(kept.shape[:-1], dtype=torch.int64)


def _best(score: Tensor, count: Tensor) -> Tensor:
    """The `count` (..., 1) largest of every row, the first of equal ones."""
    return score.argsort(dim=-1, descending=True, stable=True).argsort(-1) < count


def _nearest(rows: Tensor, mean: Tensor) -> tuple[Tensor, Tensor]:
    """The nearest mean (H, C, D) of each row (H, T, D), and how many rows each mean has, (H, C, 1)."""
    cluster = (mean.square().sum(-1).unsqueeze(1) - 2 * rows @ mean.mT).argmin(-1)
    count = torch.zeros(mean.shape[:2]).scatter_add(-1, cluster, torch.ones(cluster.shape))
    return cluster, count.unsqueeze(-1)


def _sums(rows: Tensor, cluster: Tensor, mean: Tensor) -> Tensor:
    """The sums of rows (H, T, X) by cluster, (H, C, X)."""
    index = cluster.unsqueeze(-1).expand(rows.shape)
    return torch.zeros(*mean.shape[:2], rows.shape[-1]).scatter_add(1, index, rows)
