"""The sources of a row's entries: lists of keys, the band, the stand-ins.

A chunk's queries are block-major: M = blocks x (gqa_ratio x block size), so that queries of all heads at the same
positions stand together.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property, reduce

import torch
from torch import Tensor
from torch.nn.functional import pad

from fewkeys.core.graph import Columns
from fewkeys.core.inputs import Inputs
from fewkeys.core.precision import working
from fewkeys.core.rows import stretch, take
from fewkeys.rest.base import BlockStandIns, StandIns, value_shift


class Chunk:
    """Consecutive blocks of queries of the key heads `heads`, from query `start` on.

    query: (H, gqa_ratio, N, D), scaled, in working precision; then (H, M, D). size: queries per block.
    """

    def __init__(self, query: Tensor, heads: slice, start: int, size: int, offset: int) -> None:
        self.heads, self.start, self.size, self.offset = heads, start, size, offset
        self.gqa_ratio, self.blocks = query.shape[1], -(-query.shape[2] // size)
        self.query = in_blocks(query, size)

    @property
    def first_key(self) -> int:
        """Position of the first query among the keys."""
        return self.start + self.offset

    def positions(self) -> Tensor:
        """Position of every query among the keys, (M,)."""
        place = torch.arange(self.blocks * self.size, device=self.query.device) + self.first_key
        return place.view(self.blocks, 1, self.size).expand(-1, self.gqa_ratio, -1).flatten()

    def part(self, rows: Tensor) -> Tensor:
        """What `rows` (Heads, blocks or 1, ...) holds for the chunk's heads and blocks; 1: for all blocks."""
        first = self.start // self.size if rows.shape[1] > 1 else 0
        return rows[self.heads, first : first + self.blocks]

    def by_block(self, rows: Tensor) -> Tensor:
        """(H, M, ...) -> (H, blocks, gqa_ratio x size, ...)."""
        return torch.unflatten(rows, 1, (self.blocks, self.gqa_ratio * self.size))

    def by_query(self, rows: Tensor) -> Tensor:
        """(H, M, X) -> (H, gqa_ratio, blocks x size, X)."""
        return torch.unflatten(rows, 1, (self.blocks, self.gqa_ratio, self.size)).transpose(1, 2).flatten(2, 3)


def in_blocks(rows: Tensor, size: int) -> Tensor:
    """(H, gqa_ratio, N, X) -> (H, M, X), with zeros up to whole blocks: the inverse of `Chunk.by_query`."""
    blocks = -(-rows.shape[2] // size)
    if blocks * size > rows.shape[2]:
        rows = pad(rows, (0, 0, 0, blocks * size - rows.shape[2]))
    return torch.unflatten(rows, 2, (blocks, size)).transpose(1, 2).flatten(1, 3)


def assembled(
    inputs: Inputs, heads: int, spans: Sequence[tuple[int, int]], attend: Callable[[slice, int, int], Tensor]
) -> Tensor:
    """The output (B, Hq, Nq, Dv). `attend(heads, start, stop)` gives (H, gqa_ratio, stop - start, Dv), for as many
    `heads` and one of the `spans` of queries at a time.
    """
    x, rows = inputs, []
    for head in range(0, x.batch * x.kv_heads, heads):
        parts = [attend(slice(head, head + heads), *span).to(x.query.dtype) for span in spans]
        rows.append(torch.cat(parts, 2))
    return torch.unflatten(torch.cat(rows), 0, (x.batch, x.kv_heads)).flatten(1, 2)


class Source(ABC):
    """Some of the entries of every row."""

    width: int
    """Columns that the source adds to every row."""

    @abstractmethod
    def scores(self, chunk: Chunk) -> Tensor:
        """Fresh scores (H, M, width); hidden entries are -inf."""

    @abstractmethod
    def mix(self, weights: Tensor, chunk: Chunk) -> Tensor:
        """The weighted sums (H, M, Dv) of values."""

    def multiplicity(self, chunk: Chunk) -> Tensor | None:
        """The keys that each entry represents, (H, M or 1, width); None: one, or scores include the number."""
        return None


class Kept(Source):
    """Keys that queries attend to exactly."""

    is_represented = True
    """Whether stand-ins may represent its keys for other queries."""

    @abstractmethod
    def represented(self, member: Tensor, chunk: Chunk) -> Tensor:
        """The part of every stand-in in the source's keys: sums of `member` (Heads, N, C) over each query's keys."""


class Lists(Kept):
    """Lists of keys: one for every block of queries, or one for all."""

    def __init__(self, inputs: Inputs, columns: Columns) -> None:
        self.index, used = columns.index.flatten(0, 1), columns.used.flatten(0, 1)
        self.hidden = None if bool(used.all()) else ~used
        self.is_represented, self.is_causal, self.width = columns.blocks > 1, inputs.is_causal, self.index.shape[2]
        self.key, self.value = inputs.key.flatten(0, 1), inputs.value.flatten(0, 1)

    def _rows(self, rows: Tensor, chunk: Chunk) -> Tensor:
        """Rows (Heads, N, X) of the listed keys, (H, blocks or 1, width, X)."""
        return working(take(rows[chunk.heads], chunk.part(self.index)))

    def _by_list(self, rows: Tensor, chunk: Chunk) -> Tensor:
        """(H, M, X) -> (H, blocks, M / blocks, X): by the list that the queries read."""
        return chunk.by_block(rows) if self.is_represented else rows.unsqueeze(1)

    def scores(self, chunk: Chunk) -> Tensor:
        scores = self._by_list(chunk.query, chunk) @ self._rows(self.key, chunk).mT
        if self.hidden is not None:
            scores.masked_fill_(chunk.part(self.hidden).unsqueeze(2), -torch.inf)
        if self.is_causal:
            place = chunk.positions().view(chunk.blocks if self.is_represented else 1, -1, 1)
            scores.masked_fill_(chunk.part(self.index).unsqueeze(2) > place, -torch.inf)
        return scores.flatten(1, 2)

    def mix(self, weights: Tensor, chunk: Chunk) -> Tensor:
        return (self._by_list(weights, chunk) @ self._rows(self.value, chunk)).flatten(1, 2)

    def place(self, chunk: Chunk) -> Tensor:
        """The key of every column, (H, blocks or 1, width); any key where the column is hidden."""
        return chunk.part(self.index)

    def represented(self, member: Tensor, chunk: Chunk) -> Tensor:
        members = self._rows(member, chunk)
        if self.hidden is not None:
            members = members.masked_fill(chunk.part(self.hidden).unsqueeze(-1), 0.0)
        return members.sum(2).repeat_interleave(chunk.gqa_ratio * chunk.size, 1)


class Band(Kept):
    """The keys from `left` before to `right` after every query, except those that its lists hold already."""

    def __init__(self, inputs: Inputs, band: tuple[int, int], columns: Columns | None, size: int) -> None:
        reach = max(inputs.keys, inputs.queries + inputs.offset)
        self.left, self.right = min(band[0], reach), min(band[1], reach)
        self.size, self.keys, self.width = size, inputs.keys, size + self.left + self.right
        self.key, self.value = inputs.key.flatten(0, 1), inputs.value.flatten(0, 1)
        device = inputs.key.device
        step = torch.arange(self.width, device=device) - torch.arange(size, device=device)[:, None]
        self.inside = (step >= 0) & (step <= self.left + self.right)
        self.columns = columns
        self.padding = None if inputs.valid is None else (~inputs.valid).repeat_interleave(inputs.kv_heads, 0)

    def _stretch(self, rows: Tensor, chunk: Chunk) -> Tensor:
        """The rows (H, N, D) of each block's band: a view (H, blocks, D, width), zeros outside 0 .. N - 1."""
        return stretch(rows[chunk.heads], *self._ends(chunk)).unfold(1, self.width, self.size)

    def _ends(self, chunk: Chunk) -> tuple[int, int]:
        """The first place of the first block's band, and the place after the last one's."""
        return chunk.first_key - self.left, chunk.first_key + chunk.blocks * chunk.size + self.right

    def scores(self, chunk: Chunk) -> Tensor:
        scores = chunk.by_block(chunk.query) @ working(self._stretch(self.key, chunk))
        scores.unflatten(2, (chunk.gqa_ratio, chunk.size)).masked_fill_(~self.inside, -torch.inf)
        if hidden := [*self._hidden(chunk)]:
            scores.masked_fill_(reduce(torch.logical_or, hidden).unsqueeze(2), -torch.inf)
        return scores.flatten(1, 2)

    def mix(self, weights: Tensor, chunk: Chunk) -> Tensor:
        return (chunk.by_block(weights) @ working(self._stretch(self.value, chunk)).mT).flatten(1, 2)

    def place(self, chunk: Chunk) -> Tensor:
        """The key of every column, (1, blocks, width); any key where the column is hidden."""
        return self._places(chunk).clamp(0, self.keys - 1).unsqueeze(0)

    def represented(self, member: Tensor, chunk: Chunk) -> Tensor:
        inside = self.inside
        if self.columns is not None and self.columns.blocks > 1:
            # The list itself counts the keys that it holds; shared lists have no stand-ins.
            inside = inside & ~self._listed(self.columns, chunk).unsqueeze(2)
        sums = inside.to(member.dtype) @ self._stretch(member, chunk).mT
        return sums.unsqueeze(2).expand(-1, -1, chunk.gqa_ratio, -1, -1).flatten(1, 3)

    def _places(self, chunk: Chunk) -> Tensor:
        """(blocks, width), also outside the sequence."""
        first = torch.arange(chunk.blocks, device=self.key.device)[:, None] * chunk.size + chunk.first_key - self.left
        return first + torch.arange(self.width, device=self.key.device)

    def _hidden(self, chunk: Chunk) -> Iterator[Tensor]:
        """(H or 1, blocks, width): places outside the sequence, padding, and keys in the block's lists."""
        place = self._places(chunk)
        first, last = self._ends(chunk)
        if first < 0 or last > self.keys:
            yield ((place < 0) | (place >= self.keys)).unsqueeze(0)
        if self.padding is not None:
            yield self.padding[chunk.heads][:, place.clamp(0, self.keys - 1)]
        if self.columns is not None:
            yield self._listed(self.columns, chunk)

    def _listed(self, columns: Columns, chunk: Chunk) -> Tensor:
        """(H, blocks, width): keys in the block's list."""
        lists, used = (chunk.part(part.flatten(0, 1)) for part in (columns.index, columns.used))
        place = lists - self._places(chunk)[:, :1]
        inside = used & (place >= 0) & (place < self.width)
        flags = torch.zeros((*place.shape[:2], self.width + 1), dtype=torch.bool, device=lists.device)
        # Keys outside the stretch are written to a last column, which is cut off.
        return flags.scatter_(-1, place.masked_fill(~inside, self.width), True)[..., : self.width]


class Means(Source):
    """The stand-ins for the keys that a query does not keep."""

    def __init__(self, stand_ins: StandIns, unkept: Tensor, near: Sequence[Kept]) -> None:
        s = stand_ins.changed(lambda part: part.flatten(0, 1) if part.ndim == 3 else working(part).flatten(0, 2))
        if s.factor is not None:
            # The factors are a last column of the values.
            s = replace(s, value=torch.cat([s.value, s.factor.unsqueeze(-1)], -1))
        self.rows, self.near, self.width = s, near, stand_ins.count
        self.stand_ins, self.unkept = stand_ins, unkept

    @cached_property
    def member(self) -> Tensor:
        """(H, Nk, C): the part of every key in every stand-in."""
        return self.stand_ins.member(self.unkept).flatten(0, 1)

    def scores(self, chunk: Chunk) -> Tensor:
        s, heads, query = self.rows, chunk.heads, chunk.query
        key = s.key[heads].mT
        return query @ key if s.bias is None else torch.baddbmm(s.bias[heads].unsqueeze(1), query, key)

    def multiplicity(self, chunk: Chunk) -> Tensor:
        total = self.rows.mass[chunk.heads].unsqueeze(1)
        kept = [source.represented(self.member, chunk) for source in self.near]
        if not kept:
            return total
        left = total - sum(kept)
        # A stand-in all of whose keys are kept must vanish exactly, not up to rounding.
        return left.masked_fill_(left <= 1e-5 * total, 0.0)

    def mix(self, weights: Tensor, chunk: Chunk) -> Tensor:
        mixed = weights @ self.rows.value[chunk.heads]
        if (terms := self.rows.first_order) is None:
            return mixed
        left, right, bounds, _ = (part[chunk.heads] for part in terms)
        return mixed[..., :-1] + mixed[..., -1:] * value_shift(chunk.query, left, right, bounds)


class PastMeans(Source):
    """The stand-ins for the past of each block of queries."""

    def __init__(self, stand_ins: BlockStandIns, tilted: bool) -> None:
        self.key, self.value, bias, self.size = (
            tensor.flatten(0, 1) for tensor in (stand_ins.key, stand_ins.value, stand_ins.bias, stand_ins.size)
        )
        self.bias = bias if tilted else bias.masked_fill(bias > -torch.inf, 0.0)
        self.tilted, self.width = tilted, self.key.shape[2]

    def scores(self, chunk: Chunk) -> Tensor:
        scores = chunk.by_block(chunk.query) @ chunk.part(self.key).mT
        return (scores + chunk.part(self.bias).unsqueeze(2)).flatten(1, 2)

    def multiplicity(self, chunk: Chunk) -> Tensor | None:
        if self.tilted:
            return None
        rows = chunk.gqa_ratio * chunk.size
        return chunk.part(self.size).unsqueeze(2).expand(-1, -1, rows, -1).flatten(1, 2)

    def mix(self, weights: Tensor, chunk: Chunk) -> Tensor:
        return (chunk.by_block(weights) @ chunk.part(self.value)).flatten(1, 2)
