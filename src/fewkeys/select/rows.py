"""Graphs in which every query has a list of its own."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor
from torch.nn.functional import pad

from fewkeys.core.graph import Graph
from fewkeys.core.inputs import Inputs


def query_blocks(inputs: Inputs) -> Iterator[tuple[int, int]]:
    """The first and last + 1 of blocks of queries whose scores of all keys are at most 2^24 numbers."""
    step = max(1, 2**24 // (inputs.batch * inputs.query_heads * inputs.keys))
    for start in range(0, inputs.queries, step):
        yield start, min(start + step, inputs.queries)


def listed(inputs: Inputs, masks: Iterable[Tensor]) -> Graph:
    """The graph of masks (B, Hq, m, Nk) of consecutive blocks of queries."""
    lists = []
    for mask in masks:
        count = mask.shape[-1]
        place = torch.where(mask, torch.arange(count, device=mask.device), count)
        place = place.topk(int(mask.sum(-1).max()), -1, largest=False).values
        lists.append(place.masked_fill(place == count, -1))
    longest = max(part.shape[-1] for part in lists)
    return Graph(inputs, rows=torch.cat([pad(part, (0, longest - part.shape[-1]), value=-1) for part in lists], 2))
