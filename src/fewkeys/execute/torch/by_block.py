"""Plans by blocks of queries at consecutive positions.

What all queries of a head share (lists, stand-ins) is one matrix product; the band is another, over overlapping views
of the keys. Blocks are grouped into chunks that fit the cache. Graphs with rows (oracles), and those with a scan beside
other edges, run through the reference.
"""

from dataclasses import replace
from functools import reduce

import torch
from torch import Tensor
from torch.nn.functional import pad

from fewkeys.core.graph import band_block
from fewkeys.core.precision import working
from fewkeys.core.weights import Softmax, Weights, positive
from fewkeys.execute import reference
from fewkeys.execute.problem import Problem
from fewkeys.execute.torch import by_cohort, by_scan
from fewkeys.execute.torch.distances import Distances
from fewkeys.execute.torch.sources import Band, Chunk, Kept, Lists, Means, PastMeans, Source, assembled
from fewkeys.rest.base import BlockStandIns, StandIns, unkept

CACHED_SCORES = 2**20
"""Scores held at a time: 4 MB in float32, about the cache next to a core."""


def unsupported(problem: Problem) -> None:
    """No reason: operations of torch answer every plan."""


def attend(problem: Problem) -> Tensor:
    """The output (B, Hq, Nq, Dv). Cost O(n (slots + block) (D + Dv))."""
    x, graph, stand_ins, weights = problem.inputs, problem.graph, problem.stand_ins, problem.weights
    if (scanned := by_scan.only_scan(graph)) is not None and not isinstance(stand_ins, StandIns):
        return by_scan.attend(problem, scanned)
    if problem.by_cohort:
        return by_cohort.attend(problem)
    if graph.rows is not None or graph.scan is not None:
        return reference.attend(problem)
    lead, size = 0, 64 if graph.band is None else band_block(sum(graph.band))
    if graph.columns is not None and graph.columns.blocks > 1:
        size = graph.columns.size
        lead = x.offset % size
    if lead:
        # Lists serve blocks of absolute positions: the first block is padded at the front.
        whole = replace(x, query=pad(x.query, (0, 0, lead, 0)), offset=x.offset - lead)
        extra = None if graph.extra is None else graph.extra.delayed(lead)
        led = replace(graph, inputs=whole, extra=extra)
        return attend(replace(problem, inputs=whole, graph=led))[:, :, lead:]
    sources: list[Source] = []
    if graph.columns is not None and graph.columns.index.shape[3]:
        sources.append(Lists(x, graph.columns))
    if graph.band is not None:
        sources.append(Band(x, graph.band, graph.columns, size))
    if graph.extra is not None:
        sources.append(graph.extra.source(graph))
    if isinstance(stand_ins, BlockStandIns):
        sources.append(PastMeans(stand_ins, isinstance(weights, Softmax)))
    elif isinstance(stand_ins, StandIns):
        near = [source for source in sources if isinstance(source, Kept) and source.is_represented]
        sources.append(Means(stand_ins, unkept(x, graph), near))
    if not sources:
        return reference.attend(problem)
    distances = None if x.bias is None else Distances(x, x.bias, size, graph.band)
    query = x.grouped_query().flatten(0, 1)

    def part(heads: slice, start: int, stop: int) -> Tensor:
        chunk = Chunk(working(query[heads, :, start:stop]) * x.scale, heads, start, size, x.offset)
        return chunk.by_query(_attend_chunk(chunk, sources, weights, distances))[:, :, : stop - start]

    # At most `CACHED_SCORES` scores at a time.
    width = sum(source.width for source in sources) * x.gqa_ratio
    heads = max(1, min(query.shape[0], CACHED_SCORES // max(1, width * x.queries)))
    span = max(1, CACHED_SCORES // (heads * width * size)) * size
    spans = [(start, min(start + span, x.queries)) for start in range(0, x.queries, span)]
    return assembled(x, heads, spans, part)


def _attend_chunk(chunk: Chunk, sources: list[Source], weights: Weights, distances: Distances | None) -> Tensor:
    """The output of a chunk's queries, (H, M, Dv)."""
    parts = [source.scores(chunk) for source in sources]
    multiplicity = None
    if distances is not None:
        for number, source in enumerate(sources):
            if isinstance(source, Lists | Band):
                parts[number] = parts[number] + distances.of(source.place(chunk), chunk)
            elif isinstance(source, Means):
                parts[number] = parts[number] + distances.of_stand_ins(source.member, chunk)
    elif (multiplicity := sources[-1].multiplicity(chunk)) is not None:
        # A stand-in without keys must not decide the row's largest score.
        parts[-1] = parts[-1].masked_fill(multiplicity <= 0, -torch.inf)
    weight = weights.kernel(parts)
    if multiplicity is not None:
        weight[-1] = weight[-1] * multiplicity if weight[-1].requires_grad else weight[-1].mul_(multiplicity)
    total = reduce(torch.add, (part.sum(-1, keepdim=True) for part in weight))
    mixed = reduce(torch.add, (source.mix(part, chunk) for source, part in zip(sources, weight, strict=True)))
    return mixed / positive(total)
