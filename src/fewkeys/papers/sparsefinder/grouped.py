"""Attention inside groups, in time that follows the edges.

Keys are sorted by group once, and the queries of each chunk likewise. A tile is some queries of a group times all its
keys: one small matrix product. Tiles of similar size are padded to one batch. The entries of a row are split over the
tiles of its groups, the band and the lists. So the kernel runs on split rows, and statistics of whole rows (the largest
score, sums, entmax's threshold) are accumulated line by line. No tensor is larger than the edges of a chunk.

An edge counts once: a pair that shares several groups belongs to the query's first one of them, and a pair that is
also in the band or a list belongs to the group.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from fewkeys.core.inputs import Inputs
from fewkeys.core.precision import working
from fewkeys.core.weights import Weights, positive
from fewkeys.execute.torch.sources import Chunk, KeySource, Means, PastMeans, Source

CHUNK_SCORES = 2**23
"""Scores of a chunk: many, since tiles grow with the number of queries in the chunk."""
TILE = 64
"""Queries of a group in one tile: enough for fast products, few enough to split giant groups."""
BATCH = 2**19
"""The most scores in a batch of several tiles."""
SPREAD = 1.2
"""The largest ratio between the keys of two tiles in a batch."""
WASTE, OVERHEAD = 1.25, 2**13
"""A batch is padded to at most WASTE times its scores, plus OVERHEAD, the cost of another batch in scores."""


@dataclass(frozen=True, eq=False)
class Tiles:
    """G tiles of one batch. Padding queries have row `rows` (one past the last), padding keys have bias -inf."""

    row: Tensor  # (G, Tq) rows of the chunk
    key: Tensor  # (G, Tk) rows of the heads' keys
    bias: Tensor | None  # (G, 1, Tk), None without padding keys
    hidden: Tensor | None  # (G, Tq, Tk): entries that are not edges, or count in another group

    def scores(self, query: Tensor, key: Tensor) -> Tensor:
        """(G, Tq, Tk) of chunk queries (rows, D) and keys (N, D)."""
        query, key = _rows(query, self.row.clamp_max(query.shape[0] - 1)), _rows(key, self.key)
        scores = query @ key.mT if self.bias is None else torch.baddbmm(self.bias, query, key.mT)
        return scores if self.hidden is None else scores.masked_fill_(self.hidden, -torch.inf)

    def kept(self, member: Tensor) -> Tensor:
        """The mass of every stand-in that the queries keep: (G, Tq or 1, C), from members (N, C)."""
        kept = member.new_ones((*self.key.shape[:1], 1, self.key.shape[1])) if self.bias is None else self.bias.exp()
        if self.hidden is not None:
            kept = kept * ~self.hidden
        return kept @ _rows(member, self.key)


class GroupedKeys:
    """The real keys of some heads, sorted by group."""

    def __init__(self, inputs: Inputs, query: Tensor, key: Tensor, count: int, heads: slice) -> None:
        x = inputs
        self.inputs, self.count = x, count
        self.key, self.value = (rows.flatten(0, 1)[heads].flatten(0, 1) for rows in (x.key, x.value))
        self.query_ids, ids = (_by_key_head(x, rows)[heads] for rows in (query, key))
        if x.valid is not None:
            hidden = (~x.valid).repeat_interleave(x.kv_heads, 0)[heads]
            ids = ids.masked_fill(hidden[:, None, :, None], -1)
        self.ids = _distinct(ids)
        self.heads = self.ids.shape[0] * self.ids.shape[1]
        self.size, member = _sizes(self.ids, count)
        order = member.flatten().argsort(stable=True)[: int(self.size.sum())]
        self.owner = order // self.ids.shape[-1]  # (head, group of query heads, key), flat: the row of `ids`
        self.start = self.size.cumsum(0) - self.size
        self.overlaps = [[_overlap(q, k) for k in self.ids.unbind(-1)] for q in self.query_ids.unbind(-1)]

    def tiles(self, chunk: Chunk) -> list[Tiles]:
        """All tiles of a chunk of queries, in batches."""
        ids = self._queries(chunk)
        head = torch.arange(self.heads, device=ids.device).view(*self.ids.shape[:2], 1, 1).unsqueeze(1)
        member = (ids + head * self.count).masked_fill(ids < 0, self.heads * self.count).flatten(0, 3)
        tiles: list[Tiles] = []
        for column in range(ids.shape[-1]):
            tiles += self._column(chunk, ids.flatten(0, 3)[:, : column + 1], member[:, column])
        return tiles

    def _queries(self, chunk: Chunk) -> Tensor:
        """The groups of a chunk's queries, (H, blocks, gqa_ratio, size, Mq)."""
        rows = chunk.blocks * chunk.size
        ids = self.query_ids[:, :, chunk.start : chunk.start + rows]
        ids = pad(ids, (0, 0, 0, rows - ids.shape[2]), value=-1)
        by_block: Tensor = ids.unflatten(2, (chunk.blocks, chunk.size)).transpose(1, 2)
        return by_block

    def _column(self, chunk: Chunk, ids: Tensor, member: Tensor) -> Iterator[Tiles]:
        """The tiles of the queries' last membership in `ids` (rows, m), whose groups among all heads are `member`."""
        rows, device = member.shape[0], member.device
        size = torch.cat([self.size, self.size.new_zeros(1)])
        order = member.argsort(stable=True)
        order = order[size[member[order]] > 0]
        group, queries = member[order].unique_consecutive(return_counts=True)
        if not group.numel():
            return
        pieces = (queries + TILE - 1) // TILE
        tile = torch.arange(group.numel(), device=device).repeat_interleave(pieces)
        rank = torch.arange(tile.numel(), device=device) - (pieces.cumsum(0) - pieces)[tile]
        # Pieces of equal size: as few short ones as possible.
        height = ((queries + pieces - 1) // pieces)[tile]
        first = (queries.cumsum(0) - queries)[tile] + rank * height
        height = torch.minimum(height, queries[tile] - rank * height)
        width, start = size[group][tile], self.start[group][tile]
        for batch in _batches(height, width):
            highest, widest = int(height[batch].max()), int(width[batch].max())
            row = first[batch, None] + torch.arange(highest, device=device)
            padding = row >= (first + height)[batch, None]
            row = order[row.clamp_max(order.numel() - 1)].masked_fill(padding, rows)
            column = torch.arange(widest, device=device).expand(batch.numel(), -1)
            padding = column >= width[batch, None]
            owner = self.owner[(start[batch, None] + column).clamp_max(self.owner.numel() - 1)]
            bias = None
            if bool(padding.any()):
                bias = torch.zeros(padding.shape, dtype=working(self.key[:0]).dtype, device=device)
                bias = bias.masked_fill_(padding, -torch.inf).unsqueeze(1)
            yield Tiles(row, self._key(owner), bias, self._hidden(chunk, ids, row, owner))

    def _key(self, owner: Tensor) -> Tensor:
        """Rows of `key` (H x Nk) for rows of `ids` (H x gqa_ratio x Nk)."""
        keys, ratio = self.inputs.keys, self.inputs.gqa_ratio
        return owner // (ratio * keys) * keys + owner % keys

    def _hidden(self, chunk: Chunk, ids: Tensor, row: Tensor, owner: Tensor) -> Tensor | None:
        row, hidden = row.clamp_max(ids.shape[0] - 1), None
        if self.inputs.is_causal:
            place = chunk.positions().repeat(ids.shape[0] // (chunk.blocks * chunk.gqa_ratio * chunk.size))
            hidden = place[row].unsqueeze(-1) < (owner % self.inputs.keys).unsqueeze(-2)
        for column in range(ids.shape[-1] - 1):
            for column_of_key, overlap in enumerate(self.overlaps[column]):
                if overlap:
                    key_ids = self.ids.flatten(0, 2)[owner, column_of_key]
                    shared = _comparable(ids[:, column])[row].unsqueeze(-1) == key_ids.unsqueeze(-2)
                    hidden = shared if hidden is None else hidden | shared
        return hidden

    def shared(self, chunk: Chunk, place: Tensor) -> Tensor:
        """Whether each query shares a group with each of its block's keys `place` (H or 1, blocks or 1, width).

        bool (H, M, width): edges of a band or a list that groups hold as well.
        """
        query, heads = _comparable(self._queries(chunk)), self.ids.shape[0]
        place = place.expand(heads, chunk.blocks, -1)
        at = (torch.arange(heads, device=place.device)[:, None, None], slice(None), place)
        shared = torch.zeros((*query.shape[:-1], place.shape[-1]), dtype=torch.bool, device=place.device)
        for column, row in enumerate(self.overlaps):
            for column_of_key, overlap in enumerate(row):
                if overlap:
                    key_ids = self.ids[..., column_of_key][at]  # (H, blocks, width, gqa_ratio)
                    shared |= query[..., column].unsqueeze(-1) == key_ids.movedim(-1, 2).unsqueeze(3)
        return shared.flatten(1, 3)


def mean_width(inputs: Inputs, query: Tensor, key: Tensor, count: int) -> int:
    """Scores that a position costs one key head, on average; memberships in several groups are counted separately."""
    total = 0
    for head in range(inputs.batch * inputs.kv_heads):
        sizes = [_sizes(_by_key_head(inputs, ids)[head : head + 1], count)[0] for ids in (query, key)]
        total += int((sizes[0] * sizes[1]).sum())
    return total // (inputs.batch * inputs.kv_heads * inputs.queries) + 1


def attend_chunk(
    chunk: Chunk, keys: GroupedKeys, sources: Sequence[Source], means: Means | PastMeans | None, weights: Weights
) -> Tensor:
    """The output of a chunk's queries, (H, M, Dv)."""
    tiles = keys.tiles(chunk)
    flat = chunk.query.flatten(0, 1)
    parts = []
    for source in sources:
        scores = source.scores(chunk)
        if isinstance(source, KeySource):
            scores = scores.masked_fill(keys.shared(chunk, source.place(chunk)), -torch.inf)
        parts.append(scores)
    multiplicity = None
    if means is not None:
        multiplicity = means.multiplicity(chunk, _kept(tiles, keys, chunk, sources, parts, means))
        if multiplicity is not None:
            # An empty stand-in must not be the row's largest score.
            parts[-1] = parts[-1].masked_fill(multiplicity <= 0, -torch.inf)
    rows, count = [torch.arange(flat.shape[0], device=flat.device)] * len(parts), flat.shape[0] + 1
    rows += [batch.row.flatten() for batch in tiles]
    lines = [part.flatten(0, 1) for part in parts]
    lines += [batch.scores(flat, keys.key).flatten(0, 1) for batch in tiles]
    if not lines:
        # No edges at all: zeros, with zero gradients for all inputs.
        zero = 0.0 * (working(keys.key).sum() + working(keys.value).sum())
        return (0.0 * chunk.query[..., :1] + zero).expand(-1, -1, keys.value.shape[-1])
    line_weights = weights.split_kernel(lines, rows, count)
    dense = [part.unflatten(0, chunk.query.shape[:2]) for part in line_weights[: len(parts)]]
    if multiplicity is not None:
        dense[-1] = dense[-1] * multiplicity
    total, mixed = _collect(line_weights[len(parts) :], rows[len(parts) :], tiles, keys, count)
    total, mixed = (part[:-1].unflatten(0, chunk.query.shape[:2]) for part in (total, mixed))
    for source, part in zip(sources, dense, strict=True):
        total = total + part.sum(-1, keepdim=True)
        mixed = mixed + source.mix(part, chunk)
    output: Tensor = mixed / positive(total)
    return output


def _collect(
    line_weights: Sequence[Tensor], rows: Sequence[Tensor], tiles: list[Tiles], keys: GroupedKeys, count: int
) -> tuple[Tensor, Tensor]:
    """Sums (count, 1) of the tiles' weights and their weighted values (count, Dv), by row."""
    dtype = working(keys.value[:0]).dtype
    total = torch.zeros((count, 1), dtype=dtype, device=keys.value.device)
    if not line_weights:
        return total, total.new_zeros((count, keys.value.shape[-1]))
    sums = torch.cat([part.sum(-1, keepdim=True) for part in line_weights])
    total = total.index_add(0, torch.cat(list(rows)), sums)
    mixed = line_weights[0].new_zeros((count, keys.value.shape[1]))
    for batch, row, part in zip(tiles, rows, line_weights, strict=True):
        add = part.unflatten(0, batch.row.shape) @ _rows(keys.value, batch.key)
        mixed = mixed.index_add(0, row, add.flatten(0, 1))
    return total, mixed


def _kept(
    tiles: list[Tiles],
    keys: GroupedKeys,
    chunk: Chunk,
    sources: Sequence[Source],
    parts: Sequence[Tensor],
    means: Means | PastMeans,
) -> Tensor | None:
    """The mass of every stand-in that each query keeps, (H, M, C)."""
    if isinstance(means, PastMeans):
        return None
    shape = chunk.query.shape[:2]
    member = means.member[chunk.heads].flatten(0, 1)
    by_row = member.new_zeros((shape.numel() + 1, member.shape[-1]))
    for batch in tiles:
        rows = batch.kept(member).expand(-1, batch.row.shape[1], -1)
        by_row.index_add_(0, batch.row.flatten(), rows.reshape(-1, rows.shape[-1]))
    kept: Tensor = by_row[:-1].unflatten(0, shape)
    for source, scores in zip(sources, parts, strict=True):
        # Keys of a list that all queries share are in no stand-in.
        if isinstance(source, KeySource) and source.spoken_for:
            kept = kept + source.collect((scores > -torch.inf).to(member.dtype), means.member, chunk)
    return kept


def _rows(rows: Tensor, index: Tensor) -> Tensor:
    """Rows (N, X) at index (G, T): (G, T, X), in working precision."""
    gathered: Tensor = working(rows.index_select(0, index.flatten())).unflatten(0, index.shape)
    return gathered


def _by_key_head(inputs: Inputs, ids: Tensor) -> Tensor:
    """(B, Hq, N, M) -> (B x Hkv, gqa_ratio, N, M): by the key head that the query heads read."""
    by_head: Tensor = ids.unflatten(1, (inputs.kv_heads, inputs.gqa_ratio)).flatten(0, 1)
    return by_head


def _comparable(ids: Tensor) -> Tensor:
    """Ids with -2 for none, which equals no id of a key."""
    return ids.masked_fill(ids < 0, -2)


def _distinct(ids: Tensor) -> Tensor:
    """Ids (..., M) with -1 in place of repetitions."""
    columns = list(ids.unbind(-1))
    for i in range(1, len(columns)):
        for earlier in columns[:i]:
            columns[i] = columns[i].masked_fill(columns[i] == earlier, -1)
    return torch.stack(columns, -1) if columns else ids


def _sizes(ids: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Members of every group of every head (heads x count,), and the group of ids (H, gqa_ratio, N, M) among all these.

    Members of no group come after all groups.
    """
    heads = ids.shape[0] * ids.shape[1]
    head = torch.arange(heads, device=ids.device).view(*ids.shape[:2], 1, 1)
    member = (ids + head * count).masked_fill(ids < 0, heads * count)
    return torch.bincount(member.flatten(), minlength=heads * count + 1)[:-1], member


def _overlap(query_ids: Tensor, key_ids: Tensor) -> bool:
    """Whether two sets of ids may intersect: those of different rounds or dimensions have disjoint ranges."""
    query_ids, key_ids = query_ids[query_ids >= 0], key_ids[key_ids >= 0]
    if not query_ids.numel() or not key_ids.numel():
        return False
    return bool((query_ids.min() <= key_ids.max()) & (key_ids.min() <= query_ids.max()))


def _batches(height: Tensor, width: Tensor) -> Iterator[Tensor]:
    """The indices of the tiles of each batch, which are padded to a common size."""
    kind = (width.double().log() / math.log(SPREAD)).long()
    order = (kind * (TILE + 1) + height).argsort(stable=True)
    kinds, heights, widths = (part[order].tolist() for part in (kind, height, width))
    begin, area, highest, widest = 0, 0, 0, 0
    for i in range(len(heights)):
        grown = max(highest, heights[i]), max(widest, widths[i])
        padded, true = (i - begin + 1) * grown[0] * grown[1], area + heights[i] * widths[i]
        new = kinds[i] != kinds[begin] and padded > OVERHEAD
        if i > begin and (new or padded > max(WASTE * true, OVERHEAD + true) or padded > BATCH):
            yield order[begin:i]
            begin, area, highest, widest = i, 0, 0, 0
            grown, true = (heights[i], widths[i]), heights[i] * widths[i]
        area, (highest, widest) = true, grown
    yield order[begin:]
