"""The gold graph: the keys to which entmax gives weight."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fewkeys.core.entmax import entmax
from fewkeys.core.graph import Graph
from fewkeys.core.inputs import Inputs
from fewkeys.core.validation import check_real
from fewkeys.core.work import Work
from fewkeys.select.base import Selector
from fewkeys.select.rows import listed
from fewkeys.select.top_k import score_blocks


@dataclass(frozen=True)
class EntmaxSupport(Selector):
    """(i, j) is an edge when `entmax_alpha(s_i)_j > 0`, s_i the scores of query i with all keys that it sees.

    Attention by `Entmax(alpha)` over this graph, or any that contains it, equals that over all keys. alpha > 1; larger
    alpha, fewer edges. Cost O(n^2 D), memory O(n + edges), since queries are processed in blocks.

    Source: the gold graph of Sparsefinder (arXiv 2109.12188), section 3.1.
    """

    alpha: float = 1.5
    is_oracle: ClassVar[bool] = True

    causal = True

    def __post_init__(self) -> None:
        check_real("EntmaxSupport alpha", self.alpha, above=1.0)

    def select(self, inputs: Inputs) -> Graph:
        return listed(inputs, (entmax(scores, self.alpha) > 0 for _, scores in score_blocks(inputs)))

    def covers(self, inputs: Inputs) -> bool:
        return False

    def work(self, inputs: Inputs) -> Work:
        return Work(float(inputs.keys), 2.0 * inputs.head_dim * inputs.queries * inputs.gqa_ratio)
