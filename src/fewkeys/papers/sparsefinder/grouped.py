"""Attention inside groups, in time that follows the edges.

Keys are sorted by group once, and the queries of each chunk likewise: a group's queries times all its keys is one small
matrix product. Back in the order of the queries, the products of one membership are a stretch of every row of scores.
An edge counts once: in the band or a list if it is there, else in the first group of the query that has it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce

import torch
from torch import Tensor
from torch.nn.functional import pad

from fewkeys.core.graph import Graph
from fewkeys.core.precision import working
from fewkeys.execute.torch.sources import Chunk, Kept, in_blocks


@dataclass(frozen=True, eq=False)
class Stretch:
    """One membership of the queries of a chunk: sorted by `order` into `groups` of `counts`, and back by `back`.

    `hidden`: of each group the pairs (count, keys) that are no edges or count elsewhere. `width`: the most keys.
    """

    order: Tensor
    back: Tensor
    groups: list[int]
    counts: list[int]
    hidden: list[Tensor | None]
    width: int


class GroupedKeys(Kept):
    """The keys of each query's groups: `query` (B, Hq, Nq, Mq) and `key` (B, Hq, Nk, Mk) as in `Groups`."""

    def __init__(self, graph: Graph, query: Tensor, key: Tensor, count: int) -> None:
        x = graph.inputs
        self.graph = graph
        if x.valid is not None:
            key = key.masked_fill(~x.valid[:, None, :, None], -1)
        query, key = self._numbered(query, count), self._numbered(key, count)
        members = key.clamp_min(0).flatten()
        size = torch.bincount(members, minlength=x.batch * x.query_heads * count + 1)
        owner = members.argsort(stable=True)[int(size[0]) :] // key.shape[-1]  # of all heads, flat
        size[0] = 0  # those in no group
        self.sizes, self.query_group = size.tolist(), query.clamp_min(0)
        self.owner = owner.split(self.sizes)
        self.row = owner // (x.gqa_ratio * x.keys) * x.keys + owner % x.keys  # of the key heads' keys, flat
        self.key_groups = key.flatten(0, 2).unbind(-1)
        self.overlaps = [[_overlap(ids, key_ids) for key_ids in key.unbind(-1)] for ids in query.unbind(-1)]
        self.key, self.value = (self._by_group(rows.flatten(0, 1)) for rows in (x.key, x.value))
        self.width = max(1, int(size[self.query_group].flatten(0, 2).amax(0).sum()))
        self._latest: tuple[Chunk, list[Stretch]] | None = None

    def scores(self, chunk: Chunk) -> Tensor:
        query, parts = chunk.query.flatten(0, 1), []
        for stretch in self._stretches(chunk):
            lines = []
            rows = query[stretch.order].split(stretch.counts)
            for members, group, hidden in zip(rows, stretch.groups, stretch.hidden, strict=True):
                line = members @ self.key[group].mT
                line = line if hidden is None else line.masked_fill(hidden, -torch.inf)
                lines.append(pad(line, (0, stretch.width - line.shape[1]), value=-torch.inf))
            parts.append(torch.cat(lines)[stretch.back])
        return torch.unflatten(torch.cat(parts, -1), 0, chunk.query.shape[:2])

    def mix(self, weights: Tensor, chunk: Chunk) -> Tensor:
        stretches = self._stretches(chunk)
        parts = weights.flatten(0, 1).split([stretch.width for stretch in stretches], -1)
        lines = [part[stretch.order].split(stretch.counts) for part, stretch in zip(parts, stretches, strict=True)]
        return self._sums(lines, self.value, chunk)

    def represented(self, member: Tensor, chunk: Chunk) -> Tensor:
        members, lines = self._by_group(member), []
        for stretch in self._stretches(chunk):
            sets = zip(stretch.groups, stretch.counts, stretch.hidden, strict=True)
            ones = [(members[g].new_ones((count, self.sizes[g])), hidden) for g, count, hidden in sets]
            lines.append([line if hidden is None else line.masked_fill_(hidden, 0.0) for line, hidden in ones])
        return self._sums(lines, members, chunk)

    def _sums(self, lines: Sequence[Sequence[Tensor]], by_group: Sequence[Tensor], chunk: Chunk) -> Tensor:
        """The sums (H, M, X) of rows (keys, X) of every query's groups by weights (count, at least keys)."""
        totals = []
        for stretch, parts in zip(self._stretches(chunk), lines, strict=True):
            sums = [part[:, : self.sizes[g]] @ by_group[g] for part, g in zip(parts, stretch.groups, strict=True)]
            totals.append(torch.cat(sums)[stretch.back])
        return torch.unflatten(reduce(torch.add, totals), 0, chunk.query.shape[:2])

    def _by_group(self, rows: Tensor) -> tuple[Tensor, ...]:
        """The rows (Heads, N, X) of the keys of every group."""
        parts: tuple[Tensor, ...] = working(rows.flatten(0, 1).index_select(0, self.row)).split(self.sizes)
        return parts

    def _stretches(self, chunk: Chunk) -> list[Stretch]:
        if self._latest is None or self._latest[0] is not chunk:
            groups = self.query_group[chunk.heads, :, chunk.start : chunk.start + chunk.blocks * chunk.size]
            groups = in_blocks(groups, chunk.size).flatten(0, 1)
            hidden, stretches = self._hidden(chunk, groups), []
            for membership, group in enumerate(groups.unbind(1)):
                order = group.argsort(stable=True)
                ids, counts = (part.tolist() for part in group[order].unique_consecutive(return_counts=True))
                masks = [hidden(rows, g, membership) for rows, g in zip(order.split(counts), ids, strict=True)]
                width = max(1, *(self.sizes[g] for g in ids))
                stretches.append(Stretch(order, order.argsort(), ids, counts, masks, width))
            self._latest = chunk, stretches
        return self._latest[1]

    def _hidden(self, chunk: Chunk, groups: Tensor) -> Callable[[Tensor, int, int], Tensor | None]:
        """Which pairs of a chunk's queries at `rows` and the keys of their `group` are no edges or count elsewhere."""
        x, band, columns = self.graph.inputs, self.graph.band, self.graph.columns
        positions, lists = chunk.positions().repeat(len(chunk.query)), None
        if columns is not None:
            index, used = (chunk.part(part.flatten(0, 1)) for part in (columns.index, columns.used))
            lists = index.masked_fill(~used, x.keys).flatten(0, 1).sort(-1).values

        def hidden(rows: Tensor, group: int, membership: int) -> Tensor | None:
            owner = self.owner[group]
            place, position = owner % x.keys, positions[rows].unsqueeze(-1)
            masks = [place > position] if x.is_causal else []
            if band is not None:
                masks.append((place >= position - band[0]) & (place <= position + band[1]))
            if lists is not None:
                own = lists[rows // (len(groups) // len(lists))]
                places = place.expand(len(rows), -1).contiguous()
                at = torch.searchsorted(own, places).clamp_max(own.shape[1] - 1)
                masks.append(own.gather(1, at) == places)
            for earlier in range(membership):
                for key_group, overlap in zip(self.key_groups, self.overlaps[earlier], strict=True):
                    if overlap:
                        masks.append(groups[rows, earlier].unsqueeze(-1) == key_group[owner])
            return reduce(torch.logical_or, masks) if masks else None

        return hidden

    def _numbered(self, ids: Tensor, count: int) -> Tensor:
        """Groups (B Hkv, query heads of a key head, N, M >= 1), numbered from 1 through all heads, -1 for none."""
        x = self.graph.inputs
        ids = distinct(ids if ids.shape[-1] else pad(ids, (0, 1), value=-1))
        first = torch.arange(x.batch * x.query_heads, device=ids.device).view(x.batch, -1, 1, 1) * count + 1
        return torch.unflatten(torch.where(ids < 0, -1, ids + first), 1, (x.kv_heads, x.gqa_ratio)).flatten(0, 1)


def _overlap(query: Tensor, key: Tensor) -> bool:
    """Whether ids may meet: those of different rounds or dimensions have disjoint ranges."""
    query, key = query.flatten(2), key.flatten(2)
    low, high = query.masked_fill(query < 0, torch.iinfo(query.dtype).max).amin(-1), query.amax(-1)
    return bool(((key >= low.unsqueeze(-1)) & (key <= high.unsqueeze(-1))).any())


def distinct(ids: Tensor) -> Tensor:
    """The ids (..., M), with -1 in place of repetitions."""
    return ids.masked_fill((ids.unsqueeze(-1) == ids.unsqueeze(-2)).tril(-1).any(-1), -1)
