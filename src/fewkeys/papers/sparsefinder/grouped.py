"""Attention inside groups, in time that follows the edges.

Keys are sorted by group once, and the queries of each chunk likewise: a group's queries times all its keys is one small
matrix product. The entries of a query's row are the products of its groups, side by side. So the rows of a chunk have
the form that all other sources have, and statistics of whole rows need nothing special.

An edge counts once: a pair that shares several groups belongs to the query's first one of them, and a pair that is
also in the band or a list belongs there.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from fewkeys.core.graph import Graph
from fewkeys.core.precision import working
from fewkeys.execute.torch.sources import Chunk, Kept


@dataclass(frozen=True, eq=False)
class Products:
    """The products of a chunk, one for each membership of its queries and group, their entries in one flat order.

    `row` (sum of `counts`,): the row of the chunk of every query of every product; `groups` and `counts`: the group and
    the number of queries of each product. For the rows (R) of the chunk: `entry` (R, W), the entries of every row, the
    total for none; `edge` (R, W), which of them count.
    """

    row: Tensor
    groups: list[int]
    counts: list[int]
    entry: Tensor
    edge: Tensor


class GroupedKeys(Kept):
    """The keys of each query's groups: `query` (B, Hq, Nq, Mq) and `key` (B, Hq, Nk, Mk) as in `Groups`."""

    def __init__(self, graph: Graph, query: Tensor, key: Tensor, count: int) -> None:
        x = graph.inputs
        self.graph = graph
        if x.valid is not None:
            key = key.masked_fill(~x.valid[:, None, :, None], -1)
        self.key_group, self.none = self._numbered(key, count)
        self.query_group, _ = self._numbered(query, count)
        members = self.key_group.flatten()
        self.size = torch.bincount(members, minlength=self.none + 1)
        self.size[self.none] = 0
        order = members.argsort(stable=True)[: int(self.size.sum())]
        owner = order // self.key_group.shape[-1]  # (head, group of query heads, key), flat
        self.row = owner // (x.gqa_ratio * x.keys) * x.keys + owner % x.keys  # of the heads' keys, flat
        self.place = pad(owner % x.keys, (0, 1), value=-1)
        self.start = self.size.cumsum(0) - self.size
        self.key, self.value = (self._by_group(rows.flatten(0, 1)) for rows in (x.key, x.value))
        self._latest: tuple[Chunk, Products] | None = None

    @property
    def width(self) -> int:
        widest = self.size[self.query_group].flatten(0, 2).amax(0)
        return max(1, int(widest.sum()))

    def scores(self, chunk: Chunk) -> Tensor:
        products, query = self._products(chunk), chunk.query.flatten(0, 1)
        rows = query[products.row].split(products.counts)
        flat = [(some @ self.key[group].mT).flatten() for some, group in zip(rows, products.groups, strict=True)]
        scores = torch.cat([*flat, query.new_zeros(1)])[products.entry].masked_fill(~products.edge, -torch.inf)
        return scores.unflatten(0, chunk.query.shape[:2])

    def mix(self, weights: Tensor, chunk: Chunk) -> Tensor:
        return self._collect(weights, self.value, chunk)

    def represented(self, member: Tensor, chunk: Chunk) -> Tensor:
        edge = self._products(chunk).edge.to(working(member[:0]).dtype)
        return self._collect(edge.unflatten(0, chunk.query.shape[:2]), self._by_group(member), chunk)

    def _collect(self, weights: Tensor, by_group: tuple[Tensor, ...], chunk: Chunk) -> Tensor:
        """The weighted sum (H, M, X) of the rows (keys, X) of every query's groups."""
        products = self._products(chunk)
        sizes = [by_group[group].shape[0] for group in products.groups]
        areas = [count * size for count, size in zip(products.counts, sizes, strict=True)]
        used = products.entry < sum(areas)
        place = torch.empty(sum(areas), dtype=torch.int64, device=used.device)
        place[products.entry[used]] = used.flatten().nonzero().squeeze(-1)
        flat = weights.flatten()[place].split(areas)
        sums = [
            part.view(count, size) @ by_group[group]
            for part, count, size, group in zip(flat, products.counts, sizes, products.groups, strict=True)
        ]
        added = torch.cat(sums)
        total = added.new_zeros((weights.shape[:2].numel(), added.shape[-1]))
        return total.index_add(0, products.row, added).unflatten(0, weights.shape[:2])

    def _by_group(self, rows: Tensor) -> tuple[Tensor, ...]:
        """What `rows` (Heads, N, X) holds for the keys of every group."""
        parts: tuple[Tensor, ...] = working(rows.flatten(0, 1)[self.row]).split(self.size.tolist())
        return parts

    def _products(self, chunk: Chunk) -> Products:
        if self._latest is None or self._latest[0] is not chunk:
            self._latest = chunk, self._of_chunk(chunk)
        return self._latest[1]

    def _of_chunk(self, chunk: Chunk) -> Products:
        rows, entries, places, groups, counts, total = [], [], [], [], [], 0
        memberships = self._rows_of(chunk)
        for group in memberships.flatten(0, 1).unbind(-1):
            size, order = self.size[group], group.argsort(stable=True)
            # The rows of a product follow each other, and each has as many entries as the group has keys.
            first = torch.empty_like(size)
            first[order] = size[order].cumsum(0) - size[order] + total
            step = torch.arange(max(1, int(size.max())), device=group.device)
            none = step >= size.unsqueeze(-1)
            entries.append((first.unsqueeze(-1) + step).masked_fill(none, -1))
            place = (self.start[group].unsqueeze(-1) + step).masked_fill(none, self.place.shape[0] - 1)
            places.append(self.place[place])
            number, count = group[order].unique_consecutive(return_counts=True)
            rows.append(order)
            groups += number.tolist()
            counts += count.tolist()
            total += int(size.sum())
        entry = torch.cat(entries, -1)
        edge = self._edges(chunk, memberships, places)
        return Products(torch.cat(rows), groups, counts, entry.masked_fill(entry < 0, total), edge)

    def _edges(self, chunk: Chunk, memberships: Tensor, places: list[Tensor]) -> Tensor:
        """Which entries count: those that no earlier group, band or list has, of keys that the query sees."""
        x, graph = self.graph.inputs, self.graph
        place = torch.cat(places, -1).unflatten(0, memberships.shape[:2])
        edge = place >= 0
        position = chunk.positions().unsqueeze(-1)
        if x.is_causal:
            edge &= place <= position
        if graph.band is not None:
            edge &= (place < position - graph.band[0]) | (place > position + graph.band[1])
        if graph.columns is not None:
            index, used = (part.flatten(0, 1)[chunk.heads] for part in (graph.columns.index, graph.columns.used))
            if graph.columns.blocks > 1:
                block = chunk.start // chunk.size
                index, used = index[:, block : block + chunk.blocks], used[:, block : block + chunk.blocks]
            listed = torch.zeros((*index.shape[:2], x.keys + 1), dtype=torch.bool, device=index.device)
            listed.scatter_(-1, index.masked_fill(~used, x.keys), True)[..., -1] = False
            by_list = place.masked_fill(place < 0, x.keys).unflatten(1, (index.shape[1], -1)).flatten(2)
            edge &= ~listed.gather(-1, by_list).view_as(edge)
        widths = [part.shape[-1] for part in places]
        head = torch.arange(place.shape[0], device=place.device)[:, None, None] + chunk.heads.start
        shared = chunk.gqa_ratio, chunk.size
        which = torch.arange(shared[0], device=place.device).view(1, -1, 1).expand(chunk.blocks, -1, shared[1])
        which = which.flatten()[:, None]
        for later, part in list(enumerate(place.split(widths, -1)))[1:]:
            groups = self.key_group[head, which, part.clamp_min(0)]  # (H, M, W, Mk)
            repeated = torch.zeros_like(part, dtype=torch.bool)
            for earlier in memberships[..., :later].unbind(-1):
                same = (groups == earlier[..., None, None]) & (groups != self.none)
                repeated |= same.any(-1)
            edge.split(widths, -1)[later].logical_and_(~repeated)
        return edge.flatten(0, 1)

    def _rows_of(self, chunk: Chunk) -> Tensor:
        """The groups (H, M, Mq) of a chunk's queries."""
        rows = chunk.blocks * chunk.size
        groups = self.query_group[chunk.heads, :, chunk.start : chunk.start + rows]
        groups = pad(groups, (0, 0, 0, rows - groups.shape[2]), value=self.none)
        by_block: Tensor = groups.unflatten(2, (chunk.blocks, chunk.size)).transpose(1, 2)
        return by_block.flatten(1, 3)

    def _numbered(self, ids: Tensor, count: int) -> tuple[Tensor, int]:
        """Groups (B Hkv, query heads of one key head, N, M >= 1), numbered through all heads; and the number for none."""
        x = self.graph.inputs
        ids = distinct(ids if ids.shape[-1] else pad(ids, (0, 1), value=-1))
        ids = ids.unflatten(1, (x.kv_heads, x.gqa_ratio)).flatten(0, 1)
        heads = ids.shape[:2]
        first = torch.arange(heads.numel(), device=ids.device).view(*heads, 1, 1) * count
        return (ids + first).masked_fill(ids < 0, heads.numel() * count), heads.numel() * count


def distinct(ids: Tensor) -> Tensor:
    """Ids (..., M) with -1 in place of repetitions."""
    repeated = (ids.unsqueeze(-1) == ids.unsqueeze(-2)).tril(-1).any(-1)
    return ids.masked_fill(repeated, -1)
