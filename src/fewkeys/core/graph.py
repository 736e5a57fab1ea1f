"""The keys that each query attends to exactly: a union of kinds of edges, none of which is stored as n x n."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol, Self, TypeVar

import torch
from torch import Tensor

from fewkeys.core.inputs import Inputs
from fewkeys.core.work import at_once

T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class Columns:
    """Lists of keys shared by blocks of queries.

    index (B, Hkv, blocks, S): key positions; used (same shape, bool): those that are not padding, all different in a
    list. A single block serves all queries. Of several, block b serves the queries at positions (b + f) size ..
    (b + f + 1) size - 1, f = offset // size. With place (B, Hkv, blocks, M), int64, it serves the cohort of the queries
    at place_b, counted through the query heads of the key head, -1 for none; queries of no cohort see no key at all.
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
        """The block of each of the queries start .. stop - 1."""
        position = torch.arange(start, stop, device=self.index.device) + inputs.offset % self.size
        return (position // self.size).clamp_max(self.blocks - 1)


class ExtraEdges(Protocol):
    """Edges of another kind: a frozen value of tensors. `mask` alone defines them."""

    def mask(self, start: int, stop: int) -> Tensor:
        """The edges of queries start .. stop - 1, as `Graph.mask` has them."""

    def check(self, inputs: Inputs) -> None:
        """Raise `ValueError` if these cannot be edges of such a problem."""

    def __or__(self, other: Self) -> Self: ...

    def delayed(self, count: int) -> Self:
        """The same edges with `count` queries without edges before the others."""

    def source(self, graph: Any) -> Any:
        """A `fewkeys.execute.torch.sources.Kept` of these edges of `graph`, without those of its band and lists."""


@dataclass(frozen=True, eq=False)
class Graph:
    """The edges (query, key) that are attended to exactly, for the problem `inputs` they were chosen for.

    Keys in the future or in padding are never edges.

    Attributes:
        band: every query sees the keys from so many before to so many after its own position.
        columns: blocks or cohorts of queries share a list of keys.
        rows: every query has its own list (B, Hq, Nq, R), -1 for none; only oracles need this.
        extra: edges of a kind that no executor knows; they bring their own scores and sums.
        scan: every query chooses its own keys by the codes of all keys: `fewkeys.select.key_scan.Scanned`.
    """

    inputs: Inputs
    band: tuple[int, int] | None = None
    columns: Columns | None = None
    rows: Tensor | None = None
    extra: ExtraEdges | None = None
    scan: Any = None

    def __post_init__(self) -> None:
        if self.extra is not None:
            self.extra.check(self.inputs)

    def __or__(self, other: Graph) -> Graph:
        if other.inputs is not self.inputs:
            raise ValueError("graph: expected two graphs of the same inputs, got graphs of different ones")
        if self.scan is not None and other.scan is not None:
            raise ValueError("keep: expected one KeyScan, got two; give one of them the counts of both")
        x = self.inputs
        return Graph(
            x,
            _joined(self.band, other.band, lambda a, b: (max(a[0], b[0]), max(a[1], b[1]))),
            _joined(self.columns, other.columns, lambda a, b: _join_columns(a, b, x)),
            _joined(self.rows, other.rows, lambda a, b: torch.cat([a, b], -1)),
            _joined(self.extra, other.extra, _join_extra),
            self.scan or other.scan,
        )

    @staticmethod
    def full(inputs: Inputs) -> Graph:
        """Every query sees every key."""
        reach = inputs.keys + inputs.queries + inputs.offset
        return Graph(inputs, (reach, reach))

    @property
    def shared(self) -> Columns | None:
        """The list that all queries of a head share, if there is one."""
        columns = self.columns
        return None if columns is None or columns.blocks > 1 or columns.place is not None else columns

    def mask(self, start: int, stop: int) -> Tensor:
        """The edges of queries start .. stop - 1 as a bool mask (B, Hq, stop - start, Nk)."""
        x = self.inputs
        device = x.query.device
        seen = torch.zeros((x.batch, x.query_heads, stop - start, x.keys), dtype=torch.bool, device=device)
        if self.band is not None:
            left, right = self.band
            position = torch.arange(start, stop, device=device)[:, None] + x.offset
            key = torch.arange(x.keys, device=device)
            seen |= (key >= position - left) & (key <= position + right)
        if (columns := self.columns) is not None:
            lists = marked(columns.index, columns.used, x.keys) > 0
            if columns.place is None:
                seen |= lists[:, :, columns.block(x, start, stop)].repeat_interleave(x.gqa_ratio, 1)
            else:
                cohort = cohort_of_queries(x, columns.place)[:, :, start:stop, None]
                index = cohort.clamp_min(0).expand(-1, -1, -1, x.keys)
                seen = (seen | lists.repeat_interleave(x.gqa_ratio, 1).gather(2, index)) & (cohort >= 0)
        if self.rows is not None:
            rows = self.rows[:, :, start:stop]
            seen |= marked(rows.clamp_min(0), rows >= 0, x.keys) > 0
        for edges in (self.extra, self.scan):
            if edges is not None:
                seen |= edges.mask(start, stop)
        return seen & visible(x, start, stop)

    def to_mask(self) -> Tensor:
        """All edges as a bool mask (B, Hq, Nq, Nk), in O(n^2) memory."""
        return self.mask(0, self.inputs.queries)

    def slots(self) -> float:
        """The mean number of keys that a real query attends to exactly."""
        x, kept = self.inputs, 0
        real = x.query.new_ones((x.batch, x.queries), dtype=torch.bool) if x.valid_queries is None else x.valid_queries
        for start, stop in query_blocks(x):
            kept += int((self.mask(start, stop) & real[:, None, start:stop, None]).sum())
        return kept / max(1, int(real.sum()) * x.query_heads)


def query_blocks(inputs: Inputs) -> Iterator[tuple[int, int]]:
    """The ends of blocks of queries whose scores of all keys are computed `at_once`."""
    step = max(1, at_once(inputs.query) // (inputs.batch * inputs.query_heads * inputs.keys))
    for start in range(0, inputs.queries, step):
        yield start, min(start + step, inputs.queries)


def marked(index: Tensor, used: Tensor, keys: int) -> Tensor:
    """(..., keys), uint8: ones at the used entries of lists `index` (..., S)."""
    # Unused entries may repeat a used key, in any order.
    flags = torch.zeros((*index.shape[:-1], keys), dtype=torch.uint8, device=index.device)
    return flags.scatter_reduce_(-1, index, used.to(torch.uint8), "amax")


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
    """The cohort (B, Hq, Nq) of every query, -1 for none. place: of `Columns`."""
    places = inputs.gqa_ratio * inputs.queries
    number = torch.arange(place.shape[2], device=place.device)[:, None].expand_as(place)
    cohort = torch.full((*place.shape[:2], places + 1), -1, device=place.device)
    cohort.scatter_(-1, place.masked_fill(place < 0, places).flatten(2), number.flatten(2))
    return torch.unflatten(cohort[..., :places], 2, (inputs.gqa_ratio, inputs.queries)).flatten(1, 2)


def band_block(reach: int) -> int:
    """Queries in a block that shares the keys of a band of `reach` keys beside the query's own. It scores all of these:
    small blocks waste less, large ones run faster per score.
    """
    return 16 if reach <= 64 else 32 if reach <= 128 else 64 if reach <= 256 else 128


def _joined(a: T | None, b: T | None, join: Callable[[T, T], T]) -> T | None:
    return b if a is None else a if b is None else join(a, b)


def _join_columns(a: Columns, b: Columns, inputs: Inputs) -> Columns:
    # Shared lists, and those of coarser blocks, are repeated for the finer blocks, or for cohorts.
    a, b = sorted((a, b), key=lambda columns: (columns.place is None, -columns.blocks, columns.size))
    if a.blocks > b.blocks or a.size < b.size:
        b = _refine(b, a, inputs.offset)
    used = torch.cat([a.used, b.used], -1)
    # Unused entries sort last.
    index, order = torch.cat([a.index, b.index], -1).masked_fill(~used, inputs.keys).sort(-1)
    used = used.gather(-1, order)
    used[..., 1:] &= index[..., 1:] != index[..., :-1]
    return Columns(index.clamp_max(inputs.keys - 1), used, a.size, a.place)


def _refine(coarse: Columns, fine: Columns, offset: int) -> Columns:
    if coarse.blocks == 1:
        block = torch.zeros(fine.blocks, dtype=torch.int64, device=fine.index.device)
    else:
        place = (torch.arange(fine.blocks, device=fine.index.device) + offset // fine.size) * fine.size
        block = place // coarse.size - offset // coarse.size
    return Columns(coarse.index[:, :, block], coarse.used[:, :, block], fine.size)


def _join_extra(a: ExtraEdges, b: ExtraEdges) -> ExtraEdges:
    if type(a) is not type(b):
        raise ValueError(f"keep: expected extra edges of one kind, got {type(a).__name__} and {type(b).__name__}")
    return a | b
