"""The plan in time and memory linear in the number of tokens, in plain torch.

Queries are taken in blocks of consecutive positions. What all queries of a head share (lists, stand-ins) is one matrix
product; the band is another, over each block's stretch of keys, of which overlapping views are taken instead of
copies. Blocks are grouped into chunks that fit the cache. Extra edges are attended to by their own executor.
Graphs with rows (oracles) run through the reference, some queries at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import pad

from fewkeys.core.graph import Graph, band_block
from fewkeys.core.inputs import Inputs
from fewkeys.core.precision import working
from fewkeys.core.weights import Softmax, Weights, positive
from fewkeys.execute import reference
from fewkeys.execute.problem import Problem
from fewkeys.execute.torch import by_cohort, by_scan
from fewkeys.execute.torch.distances import Distances
from fewkeys.execute.torch.sources import Band, Chunk, KeySource, Lists, Means, PastMeans, Source
from fewkeys.rest.base import BlockStandIns, StandIns

CACHED_SCORES = 2**20
"""Scores held at a time (4 MB in float32): about the cache next to a core."""


def unsupported(problem: Problem) -> None:
    """Nothing: torch's operations answer every plan."""


def attend(problem: Problem) -> Tensor:
    """The output (B, Hq, Nq, Dv), equal to `reference.attend` up to rounding. Cost O(n (slots + block) (D + Dv))."""
    x, graph, weights = problem.inputs, problem.graph, problem.weights
    if by_scan.knows(problem):
        return by_scan.attend(problem)
    if problem.by_cohort:
        return by_cohort.attend(problem)
    if graph.rows is not None or graph.full or graph.scan is not None:
        return reference.attend_in_pieces(problem)
    size = block_size(graph)
    lead = x.offset % size if graph.columns is not None and graph.columns.blocks > 1 else 0
    if lead:
        # Lists serve blocks of absolute positions: the first block is padded at the front.
        whole = replace(x, query=pad(x.query, (0, 0, lead, 0)), offset=x.offset - lead)
        return attend(replace(problem, inputs=whole, graph=_led(graph, whole, lead)))[:, :, lead:]
    if graph.extra is not None:
        return graph.extra.attend(problem)
    sources, means = row_entries(problem, size)
    distances = None if x.bias is None else Distances(x, x.bias, size, graph.band)
    width = sum(source.width for source in sources) * x.gqa_ratio

    def of_heads(heads: slice) -> Callable[[Chunk], Tensor]:
        return partial(_attend_chunk, sources=sources, means=means, weights=weights, distances=distances)

    return by_chunks(problem, size, width, CACHED_SCORES, of_heads)


def by_chunks(
    problem: Problem, size: int, width: int, limit: int, of_heads: Callable[[slice], Callable[[Chunk], Tensor]]
) -> Tensor:
    """The output (B, Hq, Nq, Dv), some heads and some blocks of `size` queries at a time, at most `limit` scores.

    `width`: the scores that a position costs a key head. `of_heads(heads)` is what answers the chunks of these heads:
    it takes a `Chunk` and returns (H, M, Dv).
    """
    x = problem.inputs
    query = x.grouped_query().flatten(0, 1)
    heads = max(1, min(query.shape[0], limit // max(1, width * x.queries)))
    span = max(1, limit // (heads * width * size)) * size
    output = x.value.new_empty((*query.shape[:3], x.value_dim))
    rows = []
    for h in range(0, query.shape[0], heads):
        row, part = [], slice(h, h + heads)
        attend_chunk = of_heads(part)
        for start in range(0, x.queries, span):
            stop = min(start + span, x.queries)
            chunk = _chunk(x, query, part, start, stop, size)
            attended = chunk.by_query(attend_chunk(chunk))[:, :, : stop - start]
            if attended.requires_grad:
                row.append(attended.to(x.query.dtype))
            else:
                output[part, :, start:stop] = attended
        if row:
            rows.append(torch.cat(row, 2))
    # Written in place without gradients; with them, in-place writes would copy the whole gradient once per chunk.
    output = torch.cat(rows) if rows else output
    by_head: Tensor = output.unflatten(0, (x.batch, x.kv_heads)).flatten(1, 2)
    return by_head


def block_size(graph: Graph) -> int:
    """Queries per block: those of the graph's lists, or a size that fits the band's reach."""
    if graph.columns is not None and graph.columns.blocks > 1:
        return graph.columns.size
    return 64 if graph.band is None else band_block(sum(graph.band))


def row_entries(problem: Problem, size: int) -> tuple[list[Source], Means | PastMeans | None]:
    """The sources of every row's entries but extra edges, the stand-ins last; and the stand-ins alone."""
    x, graph, stand_ins = problem.inputs, problem.graph, problem.stand_ins
    sources: list[Source] = []
    if graph.columns is not None:
        sources.append(Lists(x, graph.columns))
    if graph.band is not None:
        sources.append(Band(x, graph.band, graph.columns, size))
    means: Means | PastMeans | None = None
    if isinstance(stand_ins, BlockStandIns):
        means = PastMeans(stand_ins, isinstance(problem.weights, Softmax))
    elif isinstance(stand_ins, StandIns):
        # Beside extra edges, what a query keeps is counted entry by entry.
        near = [source for source in sources if isinstance(source, KeySource) and source.spoken_for]
        means = Means(stand_ins, near if graph.extra is None else [])
    if means is not None:
        sources.append(means)
    return sources, means


def _chunk(x: Inputs, query: Tensor, heads: slice, start: int, stop: int, size: int) -> Chunk:
    rows = working(query[heads, :, start:stop]) * x.scale
    blocks = -(-(stop - start) // size)
    if blocks * size > stop - start:
        rows = pad(rows, (0, 0, 0, blocks * size - (stop - start)))
    rows = rows.unflatten(2, (blocks, size)).transpose(1, 2).flatten(1, 3)
    return Chunk(heads, start, blocks, size, x.gqa_ratio, x.offset, rows)


def _attend_chunk(
    chunk: Chunk,
    sources: list[Source],
    means: Means | PastMeans | None,
    weights: Weights,
    distances: Distances | None,
) -> Tensor:
    """The output of a chunk's queries, (H, M, Dv)."""
    parts = [source.scores(chunk) for source in sources]
    multiplicity = None
    if distances is not None:
        for number, source in enumerate(sources):
            if isinstance(source, KeySource):
                parts[number] = parts[number] + distances.of(source.place(chunk), chunk)
            elif isinstance(source, Means):
                parts[number] = parts[number] + distances.of_stand_ins(source.member, chunk)
    elif means is not None:
        # A mean without keys cannot be the row's largest score by much: it is an average of keys that are all kept.
        multiplicity = means.multiplicity(chunk)
    weight = weights.kernel(parts)
    if multiplicity is not None:
        weight[-1] = weight[-1] * multiplicity if weight[-1].requires_grad else weight[-1].mul_(multiplicity)
    total = weight[0].sum(-1, keepdim=True)
    mixed = sources[0].mix(weight[0], chunk)
    for source, part in zip(sources[1:], weight[1:], strict=True):
        total += part.sum(-1, keepdim=True)
        mixed += source.mix(part, chunk)
    output: Tensor = mixed / positive(total)
    return output


def _led(graph: Graph, inputs: Inputs, lead: int) -> Graph:
    """The graph for inputs whose first `lead` queries are padding."""
    extra = None if graph.extra is None else graph.extra.delayed(lead)
    return replace(graph, inputs=inputs, extra=extra)
