"""Entries by definition: every score in float64, one block at a time."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from fewkeys.papers.levattention.keys import BLOCK, ScaledKeys
from fewkeys.sketch.gram import power_of_two

Entries = tuple[Tensor, Tensor, Tensor]
"""Rows, columns and values of some entries of one head."""
SCORES = 1 << 19
"""Scores in memory at once: few enough for a core's cache."""


def directly(query: Tensor, keys: ScaledKeys, eps: float, power: float) -> Iterator[Entries]:
    """The entries of queries (M, D), float64: every score twice, once for the normaliser and once to compare."""
    start = 0
    # A score below the rounding of its own dot product is zero: the query is orthogonal to all keys.
    noise = query.shape[-1] * torch.finfo(torch.float64).eps * (query.abs() @ keys.largest)
    for part, floor in zip(query.split(SCORES // BLOCK), noise.split(SCORES // BLOCK), strict=True):
        top = part.new_zeros(part.shape[0])
        total = part.new_zeros(part.shape[0])
        for block in keys.blocks(BLOCK):
            scores = (part @ block.mT).abs()
            # Scores are divided by a power of two near the largest so far, so that high powers do not underflow.
            higher = torch.maximum(top, power_of_two(scores.amax(-1)) * (scores.amax(-1) > 0))
            total = total * torch.where(top > 0, top / higher, 0.0).nan_to_num() ** power
            top = higher
            total = total + raised(scores / torch.where(top > 0, top, 1.0).unsqueeze(-1), power).sum(-1)
        real = top > floor
        total, top = torch.where(real, total, torch.inf), torch.where(real, top, 1.0)
        for number, block in enumerate(keys.blocks(BLOCK)):
            value = raised((part @ block.mT) / top.unsqueeze(-1), power) / total.unsqueeze(-1)
            row, column = (value >= eps).nonzero(as_tuple=True)
            yield row + start, column + number * BLOCK, value[row, column]
        start += part.shape[0]


def raised(scores: Tensor, power: float) -> Tensor:
    """`|s|^p`, in place. Squares are far cheaper than powers, and more accurate."""
    if power % 2:
        return scores.abs_().pow_(power)
    return scores.square_() if power == 2 else scores.square_().pow_(power / 2)
