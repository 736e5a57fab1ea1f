"""The support of entmax on scores of few dimensions."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch
from experiments.sparsefinder.baselines.draws import normal
from torch import Tensor

from fewkeys.core.entmax import entmax
from fewkeys.core.graph import Graph, query_blocks, visible
from fewkeys.core.inputs import Inputs
from fewkeys.core.validation import check_count, check_real
from fewkeys.core.work import Work
from fewkeys.papers.sparsefinder.patterns import listed
from fewkeys.papers.sparsefinder.space import Projection, check_space, projected
from fewkeys.select.base import Selector


@dataclass(frozen=True)
class LowRankEntmax(Selector, listed=True):
    """(i, j) is an edge when `entmax_alpha(scale q'_i . k'_j)_j > 0`, q' and k' of few dimensions.

    Args:
        rank: dimensions of a random projection, Gaussian of variance 1 / rank, the same for queries, keys, sequences
            and heads, drawn from the call's generator: q' . k' has mean q . k, and the scale is the call's. Or
        project: a given projection; the scale is then `1 / sqrt(rank)`, as for a head of that dimension.
        alpha: of entmax, > 1.

    Scores all pairs, at lower cost: O(n^2 rank). The graph runs through the reference, O(n^2 D).

    Source: the low-dimensional baseline of Sparsefinder (arXiv 2109.12188), section 4.
    """

    rank: int | None = None
    project: Projection | None = None
    alpha: float = 1.5
    is_oracle: ClassVar[bool] = True

    causal = True

    def __post_init__(self) -> None:
        if (self.rank is None) == (self.project is None):
            raise ValueError(f"LowRankEntmax: expected exactly one of rank and project, got {self}")
        if self.rank is not None:
            check_count("LowRankEntmax rank", self.rank)
        check_real("LowRankEntmax alpha", self.alpha, above=1.0)
        check_space(self.project)

    def select(self, inputs: Inputs) -> Graph:
        x = inputs
        query, key = projected(x, self.project)
        if self.project is None:
            rank = self.rank or 1
            matrix = normal(x, (x.head_dim, rank), query) * rank**-0.5
            query, key, scale = query @ matrix, key @ matrix, x.scale
        else:
            scale = self.project.rank**-0.5
        return listed(x, self._supports(x, query * scale, key))

    def _supports(self, x: Inputs, query: Tensor, key: Tensor) -> Iterator[Tensor]:
        for start, stop in query_blocks(x):
            scores = (query[:, :, start:stop] @ key.mT).masked_fill(~visible(x, start, stop), -torch.inf)
            yield entmax(scores, self.alpha) > 0

    def covers(self, inputs: Inputs) -> bool:
        return False

    def work(self, inputs: Inputs) -> Work:
        rank = self.rank if self.project is None else self.project.rank
        return Work(float(inputs.keys), 2.0 * (rank or 1) * inputs.queries * inputs.gqa_ratio)
