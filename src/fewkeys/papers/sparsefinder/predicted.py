"""Edges predicted from few dimensions, before any score is computed."""

from __future__ import annotations

from dataclasses import dataclass

from fewkeys.core.graph import Graph
from fewkeys.core.inputs import Inputs
from fewkeys.core.work import Work
from fewkeys.papers.sparsefinder.groupings import Edges, Fitted, Grouping, Joined
from fewkeys.papers.sparsefinder.projection import Centroids, Projection, check_space, projected
from fewkeys.select.base import Selector


@dataclass(frozen=True)
class Predicted(Selector):
    """The edges of a grouping between queries and keys of one layer, in a learned space or as they are.

    `Sparsefinder.selector` makes this selector with all fitted values. `Distance` and `Buckets` on queries and keys as
    they are need none: `Predicted(Buckets(8))`.

    Args:
        grouping: `Distance`, `Buckets`, `Clusters` or `ClusterPairs`.
        project: the space, of as many query heads as the layer has; None: q and k as they are.
        fitted: what the grouping learned of the space: `Centroids` (Hq, rounds count, r) for `Clusters`, `Edges` for
            `Buckets` of equal size where queries must not look at each other, `Joined` for `ClusterPairs`.

    Compared by content, saved with plans. No randomness, no gradient. Cost O(n D r) for the space, then the grouping's.

    Source: Sparsefinder (arXiv 2109.12188), section 3.
    """

    grouping: Grouping
    project: Projection | None = None
    fitted: Fitted = None

    def __post_init__(self) -> None:
        if not isinstance(self.grouping, Grouping):
            raise TypeError(
                f"grouping: expected Distance, Buckets, Clusters or ClusterPairs, got {type(self.grouping).__name__}"
            )
        check_space(self.project, self.fitted if isinstance(self.fitted, Centroids) else None)
        learns = self.grouping.learns
        if not isinstance(self.fitted, learns):
            raise TypeError(
                f"fitted: expected {learns[0].__name__} for {self.grouping}, got {type(self.fitted).__name__}; use "
                "Sparsefinder.selector"
            )
        if (expected := self.grouping.expected_size(self.fitted)) is not None:
            raise ValueError(f"fitted: expected {expected}, got {self.fitted}")

    def select(self, inputs: Inputs) -> Graph:
        query, key = projected(inputs, self.project)
        heads, rank = query.shape[1], query.shape[3]
        if (isinstance(self.fitted, Edges) and self.fitted.query.shape[:2] != (heads, rank)) or (
            isinstance(self.fitted, Joined) and self.fitted.query.shape[::2] != (heads, rank)
        ):
            raise ValueError(
                f"fitted: expected values of {heads} query heads in {rank} dimensions, got "
                f"{self.fitted}; use the selector of the layer and model it was fitted on"
            )
        return self.grouping.graph(inputs, query, key, self.fitted)

    def covers(self, inputs: Inputs) -> bool:
        return self.grouping.joins_all

    @property
    def is_oracle(self) -> bool:  # type: ignore[override]
        return self.grouping.is_oracle

    @property
    def causal(self) -> bool:
        return self.grouping.causal(self.fitted)

    def work(self, inputs: Inputs) -> Work:
        rank = inputs.head_dim if self.project is None else self.project.rank
        expected_keys, choose = self.grouping.work(inputs, rank, self.fitted)
        space = 0.0 if self.project is None else 4.0 * rank * inputs.head_dim
        return Work(expected_keys, (choose + space) * inputs.gqa_ratio)

    def __str__(self) -> str:
        return f"{self.grouping}{' as they are' if self.project is None else f' in {self.project.rank} dimensions'}"
