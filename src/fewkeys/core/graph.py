"""The keys that each query attends to exactly.

A `Graph` is a union of these kinds of edges, each stored in the space its pattern needs, never as n x n:

* a band: every query sees the keys from `left` before to `right` after its own position;
* columns: blocks of consecutive queries share a list of keys (one block: all queries share it);
* rows: every query has its own list of keys (only oracles need this);
* a scan: every query chooses its own keys by the codes of all keys;
* extra edges: of a kind that this package's executors do not know; they bring their own scores and sums.

Causality and padding hold for every kind: hidden keys are never edges.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol, Self

import torch
from torch import Tensor

from fewkeys.core.inputs import Inputs


@dataclass(frozen=True, eq=False)
class Columns:
    """Key lists shared by blocks of queries.

    `index` (B, Hkv, blocks, S) has key positions, and `used` (same shape, bool) marks the entries that are not padding;
    no used entry appears twice in a list. A single block serves all queries. Several blocks are ranges of positions:
    block b serves the queries at positions (b + f) size .. (b + f + 1) size - 1, f = offset // size. With
    `place` (B, Hkv, blocks, M), int64, blocks serve cohorts of queries wherever they stand: block b the queries at
    place_b, counted through all query heads that read the key head, -1 for none. Queries of no block see no key, also
    not through a band.
    """

    index: Tensor
    used: Tensor
    size: int
    place: Tensor | None = None

    @staticmethod
    def shared(index: Tensor, used: Tensor, queries: int) -> Columns:
        """One list (B, Hkv, S) for all queries."""
        return Columns(index.unsqueeze(2), used.unsqueeze(2), queries)

    @property
    def blocks(self) -> int:
        return self.index.shape[2]

    def block(self, inputs: Inputs, start: int, stop: int) -> Tensor:
        """The block that serves each of the queries start .. stop - 1."""
        position = torch.arange(start, stop, device=self.index.device) + inputs.offset % self.size
        return position // self.size if self.blocks > 1 else torch.zeros_like(position)


class ScanEdges(Protocol):
    """Edges that every query chooses for itself: `fewkeys.select.key_scan.Scanned`."""

    def mask(self, start: int, stop: int) -> Tensor:
        """The edges of queries start .. stop - 1 as a bool mask (B, Hq, stop - start, Nk)."""


class ExtraEdges(Protocol):
    """Edges of another kind. A frozen value of tensors; `mask` alone defines the edges."""

    def check(self, inputs: Inputs) -> None:
        """Raise `ValueError` if these cannot be edges of such a problem."""

    def mask(self, start: int, stop: int) -> Tensor:
        """The edges of queries start .. stop - 1 as a bool mask (B, Hq, stop - start, Nk)."""

    def __or__(self, other: Self) -> Self:
        """The edges of either."""

    def delayed(self, count: int) -> Self:
        """The same edges with `count` queries without edges before the others."""

    def source(self, graph: Any) -> Any:
        """A `fewkeys.execute.torch.sources.Kept` of these edges of `graph`, without those of its band and its lists."""


@dataclass(frozen=True, eq=False)
class Graph:
    """The edges (query, key) that are attended to exactly, for the problem `inputs` they were chosen for."""

    inputs: Inputs
    band: tuple[int, int] | None = None
    columns: Columns | None = None
    rows: Tensor | None = None  # (B, Hq, Nq, R) key positions, -1 for none
    full: bool = False
    extra: ExtraEdges | None = None
    scan: ScanEdges | None = None

    def __post_init__(self) -> None:
        if self.extra is not None:
            self.extra.check(self.inputs)

    def __or__(self, other: Graph) -> Graph:
        if other.inputs is not self.inputs:
            raise ValueError("graph: expected two graphs of the same inputs, got graphs of different ones")
        if self.scan is not None and other.scan is not None:
            raise ValueError("keep: expected one KeyScan, got two; give one of them the counts of both")
        return Graph(
            self.inputs,
            _join_bands(self.band, other.band),
            _join_columns(self.columns, other.columns, self.inputs),
            _join_rows(self.rows, other.rows),
            self.full or other.full,
            _join_extra(self.extra, other.extra),
            self.scan or other.scan,
        )

    @cached_property
    def hidden(self) -> Tensor | None:
        """(B, Hkv, Nk), uint8, ones for keys that are in no band and no stand-in: padding, and the keys of a list that
        all queries share. None if there are none.
        """
        x, shared = self.inputs, self.columns
        if shared is not None and (shared.blocks > 1 or shared.place is not None):
            shared = None
        if x.valid is None and shared is None:
            return None
        hidden = torch.zeros((x.batch, x.kv_heads, x.keys), dtype=torch.uint8, device=x.key.device)
        if x.valid is not None:
            hidden += (~x.valid).unsqueeze(1)
        if shared is not None:
            # Unused entries may repeat a used key, which is hidden in any order.
            hidden.scatter_reduce_(-1, shared.index.squeeze(2), shared.used.squeeze(2).to(torch.uint8), "amax")
        return hidden

    def mask(self, start: int, stop: int) -> Tensor:
        """The edges of queries start .. stop - 1 as a bool mask (B, Hq, stop - start, Nk)."""
        x = self.inputs
        device, heads, count = x.query.device, x.query_heads, stop - start
        position = torch.arange(start, stop, device=device)[:, None] + x.offset
        key = torch.arange(x.keys, device=device)
        seen = torch.full((x.batch, heads, count, x.keys), self.full, device=device)
        if self.band is not None:
            left, right = self.band
            seen |= (key >= position - left) & (key <= position + right)
        if self.columns is not None:
            columns = self.columns
            # Unused entries may repeat a used key: count hits instead of writing flags, so that order does not matter.
            hits = torch.zeros((x.batch, x.kv_heads, columns.blocks, x.keys), dtype=torch.int32, device=device)
            lists = hits.scatter_add_(-1, columns.index, columns.used.to(torch.int32)) > 0
            if columns.place is None:
                seen |= lists[:, :, columns.block(x, start, stop)].repeat_interleave(x.gqa_ratio, 1)
            else:
                cohort = cohort_of_queries(x, columns.place)[:, :, start:stop, None]
                lists = lists.repeat_interleave(x.gqa_ratio, 1).gather(
                    2, cohort.clamp_min(0).expand(-1, -1, -1, x.keys)
                )
                seen = (seen | lists) & (cohort >= 0)
        if self.rows is not None:
            rows = self.rows[:, :, start:stop]
            hits = torch.zeros((x.batch, heads, count, x.keys), dtype=torch.int32, device=device)
            seen |= hits.scatter_add_(-1, rows.clamp_min(0), (rows >= 0).to(torch.int32)) > 0
        if self.extra is not None:
            seen |= self.extra.mask(start, stop)
        if self.scan is not None:
            seen |= self.scan.mask(start, stop)
        return seen & visible(x, start, stop)

    def to_mask(self) -> Tensor:
        """All edges as a bool mask (B, Hq, Nq, Nk); O(n^2) memory, for tests, oracles and pictures."""
        return self.mask(0, self.inputs.queries)

    def edges(self) -> Tensor:
        """All edges as indices (4, M): batch, query head, query, key; sorted."""
        return torch.stack(self.to_mask().nonzero(as_tuple=True))

    def sparsity(self) -> float:
        """`1 - |edges| / |visible pairs|` over real queries."""
        kept, total = self._counts()
        return 1.0 - kept.sum().item() / max(1, int(total.sum()))

    def slots(self) -> float:
        """The mean number of keys that a real query attends to exactly."""
        kept, total = self._counts()
        return float(kept.sum().item() / max(1, total.numel()))

    def _counts(self) -> tuple[Tensor, Tensor]:
        """Kept and visible keys of every real query, flat; in blocks of queries, so that memory stays linear."""
        x = self.inputs
        step = max(1, 2**24 // (x.batch * x.query_heads * x.keys))
        kept, total = [], []
        for start in range(0, x.queries, step):
            stop = min(start + step, x.queries)
            kept.append(self._real(self.mask(start, stop).sum(-1), start))
            total.append(self._real(visible(x, start, stop).sum(-1).expand(x.batch, x.query_heads, -1), start))
        return torch.cat(kept), torch.cat(total)

    def _real(self, numbers: Tensor, start: int = 0) -> Tensor:
        """The entries of `numbers` (B, Hq, M), for queries from `start` on, that belong to real queries; flat."""
        x, stop = self.inputs, start + numbers.shape[-1]
        real = torch.ones((x.batch, stop - start), dtype=torch.bool, device=numbers.device)
        if x.valid_queries is not None:
            real = x.valid_queries[:, start:stop]
        return numbers[real[:, None].expand(-1, x.query_heads, -1)]


def visible(inputs: Inputs, start: int, stop: int) -> Tensor:
    """The keys that queries start .. stop - 1 may see, broadcastable to (B, Hq, stop - start, Nk)."""
    device = inputs.query.device
    seen = torch.ones((1, 1, stop - start, inputs.keys), dtype=torch.bool, device=device)
    if inputs.is_causal:
        position = torch.arange(start, stop, device=device)[:, None] + inputs.offset
        seen = (torch.arange(inputs.keys, device=device) <= position)[None, None]
    if inputs.valid is not None:
        seen = seen & inputs.valid[:, None, None]
    return seen


def cohort_of_queries(inputs: Inputs, place: Tensor) -> Tensor:
    """The cohort (B, Hq, Nq) of every query, -1 for none, from the places (B, Hkv, H, M) of each cohort's queries."""
    x, places = inputs, inputs.gqa_ratio * inputs.queries
    number = torch.arange(place.shape[2], device=place.device)[:, None].expand_as(place)
    cohort = torch.full((*place.shape[:2], places + 1), -1, device=place.device)
    cohort.scatter_(-1, place.masked_fill(place < 0, places).flatten(2), number.flatten(2))
    by_head: Tensor = cohort[..., :places].unflatten(2, (x.gqa_ratio, x.queries))
    return by_head.flatten(1, 2)


def band_block(reach: int) -> int:
    """Queries in a block that shares the keys of a band; `reach`: the keys of the band beside the query's own.

    A block of m queries scores m + reach keys: small blocks waste less, large ones run faster per score.
    """
    return 16 if reach <= 64 else 32 if reach <= 128 else 64 if reach <= 256 else 128


def _join_bands(a: tuple[int, int] | None, b: tuple[int, int] | None) -> tuple[int, int] | None:
    if a is None or b is None:
        return a or b
    return max(a[0], b[0]), max(a[1], b[1])


def _join_columns(a: Columns | None, b: Columns | None, inputs: Inputs) -> Columns | None:
    if a is None or b is None:
        return a or b
    # Shared lists, and those of coarser blocks, are repeated for the finer blocks, or for cohorts.
    a, b = sorted((a, b), key=lambda columns: (columns.place is None, -columns.blocks, columns.size))
    if a.blocks > b.blocks or a.size < b.size:
        b = _refine(b, a, inputs.offset)
    keys = inputs.keys
    index, used = torch.cat([a.index, b.index], -1), torch.cat([a.used, b.used], -1)
    index = index.masked_fill(~used, keys)  # unused entries sort last
    index, order = index.sort(-1)
    used = used.gather(-1, order)
    used[..., 1:] &= index[..., 1:] != index[..., :-1]
    return Columns(index.clamp_max(keys - 1), used, a.size, a.place)


def _refine(coarse: Columns, fine: Columns, offset: int) -> Columns:
    """The coarse lists, one for each fine block."""
    if coarse.blocks == 1:
        block = torch.zeros(fine.blocks, dtype=torch.int64, device=fine.index.device)
    else:
        place = (torch.arange(fine.blocks, device=fine.index.device) + offset // fine.size) * fine.size
        block = place // coarse.size - offset // coarse.size
    return Columns(coarse.index[:, :, block], coarse.used[:, :, block], fine.size)


def _join_rows(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    if a is None or b is None:
        return a if b is None else b
    return torch.cat([a, b], -1)


def _join_extra(a: ExtraEdges | None, b: ExtraEdges | None) -> ExtraEdges | None:
    if a is None or b is None:
        return a or b
    if type(a) is not type(b):
        raise ValueError(f"keep: expected extra edges of one kind, got {type(a).__name__} and {type(b).__name__}")
    return a | b
