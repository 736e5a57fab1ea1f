"""Plans with lists for cohorts of queries.

Queries are gathered by cohort, so that a cohort's list and its stand-ins are one matrix product. A band is one product
for every block of consecutive queries: its scores are gathered by cohort, and its weights go back to the order of the
queries. Under a bias of distances, masses of stand-ins are gathered likewise.
"""

from dataclasses import replace
from typing import cast

import torch
from torch import Tensor
from torch.nn.functional import one_hot, pad

from fewkeys.core.distances import logarithm
from fewkeys.core.graph import Columns, Graph, band_block, cohort_of_queries, marked
from fewkeys.core.inputs import Inputs
from fewkeys.core.precision import working
from fewkeys.core.rows import take
from fewkeys.core.weights import positive
from fewkeys.core.work import at_once
from fewkeys.execute.problem import Problem
from fewkeys.execute.torch.distances import Distances
from fewkeys.execute.torch.sources import Band, Chunk, in_blocks
from fewkeys.rest.base import StandIns, value_shift


def attend(problem: Problem) -> Tensor:
    """The output (B, Hq, Nq, Dv). Cost O(n slots (D + Dv))."""
    x, s = problem.inputs, problem.stand_ins
    width = _lists(problem)[0].index.shape[3] + (s.count if isinstance(s, StandIns) else 0)
    heads = max(1, at_once(x.query) // (x.gqa_ratio * x.queries * width))
    sequences, rows = max(1, heads // x.kv_heads), []
    for first in range(0, x.batch, sequences):
        batch = slice(first, first + sequences)
        parts = [_part(problem, (batch, slice(head, head + heads))) for head in range(0, x.kv_heads, heads)]
        rows.append(torch.cat([_attend(part) for part in parts], 1))
    return torch.cat(rows).to(x.query.dtype)


def _lists(problem: Problem) -> tuple[Columns, Tensor]:
    """The lists of cohorts, and the places of their queries."""
    columns = cast("Columns", problem.graph.columns)
    return columns, cast("Tensor", columns.place)


def _part(problem: Problem, part: tuple[slice, slice]) -> Problem:
    s, (columns, place), (batch, heads) = problem.stand_ins, _lists(problem), part
    inputs = problem.inputs.heads(heads, batch)
    lists = Columns(columns.index[part], columns.used[part], columns.size, place[part])
    if isinstance(s, StandIns):
        s = s.changed(lambda tensor: tensor[part])
    return replace(problem, inputs=inputs, graph=Graph(inputs, problem.graph.band, lists), stand_ins=s)


def _attend(problem: Problem) -> Tensor:
    x, s, band, (columns, places) = problem.inputs, problem.stand_ins, problem.graph.band, _lists(problem)
    place = places.clamp_min(0)
    size = 64 if band is None else band_block(sum(band))
    distances = None if x.bias is None else Distances(x, x.bias, size, band)
    queries = working(x.grouped_query().flatten(2, 3)) * x.scale
    near = None if band is None else _Near(problem, band, queries, distances)
    query = take(queries, place)
    list_key, list_value = (working(take(rows, columns.index)) for rows in (x.key, x.value))
    scores = [query @ list_key.mT]
    biases = None if distances is None else _Biases(x, distances, columns, place)
    if biases is not None:
        scores[0] = scores[0] + biases.of_list
    if not bool(columns.used.all()):
        scores[0] = scores[0].masked_fill(~columns.used.unsqueeze(3), -torch.inf)
    if near is not None:
        scores.append(take(near.scores, place))
    if isinstance(s, StandIns):
        represented = s.size.unsqueeze(3)
        extra = query @ s.key.mT if s.bias is None else query @ s.key.mT + s.bias.unsqueeze(3)
        if biases is not None:
            represented, extra = biases.mass(s), extra + biases.largest
        elif near is not None:
            represented = represented - take(near.counts(s), place)
        scores.append(extra + logarithm(s.mass.unsqueeze(3) * represented / s.size.unsqueeze(3).clamp_min(1)))
    weights = problem.weights.kernel(scores)
    total = torch.stack([part.sum(-1, keepdim=True) for part in weights]).sum(0)
    mixed = weights[0] @ list_value
    if isinstance(s, StandIns):
        mixed = mixed + weights[-1] @ s.value
        if (terms := s.first_order) is not None:
            left, right, bounds, factor = terms
            mixed = mixed + (weights[-1] @ factor.unsqueeze(-1)) * value_shift(query, left, right, bounds)
    if near is None:
        output = _in_order(x, places, mixed / positive(total))
    else:
        together = _in_order(x, places, torch.cat([mixed, total, weights[1]], -1))
        mixed, total, of_near = together.split([x.value_dim, 1, near.scores.shape[-1]], -1)
        output = (mixed + near.mix(of_near)) / positive(total)
    return torch.unflatten(output, 2, (x.gqa_ratio, -1)).flatten(1, 2)


class _Near:
    """The keys of a band around every query but those that its cohort's list holds.

    `scores` (B, Hkv, R Nq, width): of the R query heads that read a key head, one after the other, and of the keys
    around each block of consecutive queries.
    """

    def __init__(self, problem: Problem, band: tuple[int, int], query: Tensor, distances: Distances | None) -> None:
        x, (columns, places), size = problem.inputs, _lists(problem), band_block(sum(band))
        self.inputs = x
        self.band = Band(x, band, None, size)
        self.chunk = Chunk(self._by_head(query), slice(None), 0, size, x.offset)
        scores, around = self.band.scores(self.chunk), self.band.place(self.chunk)
        if distances is not None:
            scores = scores + distances.of(around, self.chunk)
        self.position = around[0].repeat_interleave(size, 0)[: x.queries].repeat(x.gqa_ratio, 1)
        listed = marked(columns.index, columns.used, x.keys)
        cohort = cohort_of_queries(x, places).reshape(x.batch, x.kv_heads, -1).clamp_min(0)
        at = cohort.unsqueeze(-1) * x.keys + self.position
        hidden = listed.flatten(2).gather(-1, at.flatten(2)).view(at.shape) > 0
        self.scores = self._by_query(scores).masked_fill(hidden, -torch.inf)

    def _by_head(self, rows: Tensor) -> Tensor:
        """(B, Hkv, R Nq, X) -> (B Hkv, R, Nq, X)."""
        return torch.unflatten(rows, 2, (self.inputs.gqa_ratio, -1)).flatten(0, 1)

    def _by_query(self, rows: Tensor) -> Tensor:
        """(B Hkv, M, X) in the order of the chunk -> (B, Hkv, R Nq, X)."""
        by_query = self.chunk.by_query(rows)[:, :, : self.inputs.queries].flatten(1, 2)
        return torch.unflatten(by_query, 0, (self.inputs.batch, -1))

    def mix(self, weights: Tensor) -> Tensor:
        """The weighted sums (B, Hkv, R Nq, Dv) of the values."""
        return self._by_query(self.band.mix(in_blocks(self._by_head(weights), self.chunk.size), self.chunk))

    def counts(self, stand_ins: StandIns) -> Tensor:
        """How many of a query's keys here each cluster has, (B, Hkv, R Nq, C)."""
        seen = self.scores > -torch.inf
        counts = stand_ins.size.new_zeros((*seen.shape[:3], stand_ins.count))
        return counts.scatter_add_(-1, stand_ins.label[..., self.position], seen.to(counts.dtype))


class _Biases:
    """A bias of distances: of lists, `of_list` (B, Hkv, H, M, S), and in the masses of stand-ins. `largest`
    (B, Hkv, H, M, 1): of each query's head.
    """

    def __init__(self, inputs: Inputs, distances: Distances, columns: Columns, place: Tensor) -> None:
        x, self.inputs, self.index, self.place = inputs, inputs, columns.index, place
        self.distances, bias = distances, distances.bias
        head = place // x.queries + x.gqa_ratio * torch.arange(x.kv_heads, device=place.device)[:, None, None]
        distance = columns.index.unsqueeze(3) - (place % x.queries + x.offset).unsqueeze(-1)
        self.of_list, self.largest = bias.at(head.unsqueeze(-1), distance), bias.largest[head].unsqueeze(-1)
        self.listed = columns.used.unsqueeze(3)
        if (band := distances.band) is not None:
            self.listed = self.listed & ((distance < -band[0]) | (distance > band[1]))

    def mass(self, stand_ins: StandIns) -> Tensor:
        """(B, Hkv, H, M, C): sums of exp(bias - largest) over the keys of each cluster that a query does not keep."""
        x, label = self.inputs, stand_ins.label
        cluster = one_hot(label, stand_ins.count).to(self.of_list.dtype)
        real = cluster if x.valid is None else cluster * x.valid[:, None, :, None]
        blocks = -(-x.queries // self.distances.size)
        by_block = self.distances.mass(real.flatten(0, 1), slice(None), x.offset, blocks)
        by_head = by_block.transpose(1, 2).flatten(2, 3)[:, :, : x.queries]
        mass = take(by_head.flatten(1, 2).unflatten(0, (x.batch, x.kv_heads)), self.place)
        left = mass - ((self.of_list - self.largest).exp() * self.listed) @ take(cluster, self.index)
        # A stand-in all of whose keys are kept must vanish exactly, not up to rounding.
        return left.masked_fill(left <= 64 * torch.finfo(mass.dtype).eps * mass, 0.0)


def _in_order(inputs: Inputs, place: Tensor, rows: Tensor) -> Tensor:
    """Rows (B, Hkv, H, M, X) in the order of the queries, (B, Hkv, R Nq, X); zeros for queries of no cohort."""
    queries, places = inputs.gqa_ratio * inputs.queries, place.flatten(2)
    row = torch.arange(places.shape[2], device=place.device).expand_as(places)
    # The row of each query; behind the last one for queries of no cohort.
    back = torch.full((*places.shape[:2], queries + 1), places.shape[2], device=place.device)
    back.scatter_(-1, places.masked_fill(places < 0, queries), row)
    return take(pad(rows.flatten(2, 3), (0, 0, 0, 1)), back[..., :queries])
