"""Edges predicted from few dimensions, before any score is computed."""

from __future__ import annotations

from dataclasses import dataclass

from fewkeys.graph import Graph
from fewkeys.inputs import Inputs
from fewkeys.select.base import Selector
from fewkeys.select.groupings import Buckets, Clusters, Distance, Edges, Fitted, Grouping
from fewkeys.select.projection import Centroids, Projection, check_space, projected


@dataclass(frozen=True)
class Predicted(Selector):
    """The edges that a grouping finds between queries and keys of one layer, in a learned space or as they are.

    `fewkeys.Sparsefinder.selector` makes them, with everything that they need; `Distance` and `Buckets` on queries and
    keys as they are need nothing: `Predicted(Buckets(8))`.

    Args:
        grouping: `Distance`, `Buckets` or `Clusters`.
        project: the space, of as many query heads as the layer has; None: q and k as they are.
        fitted: what the grouping learned of the space: `Centroids` (Hq, rounds count, r) for `Clusters`, `Edges` for
            `Buckets` of equal size where queries must not look at each other.

    Compared by content, saved with plans. No randomness, no gradient. Cost O(n D r) for the space, then the grouping's.

    Source: Sparsefinder (arXiv 2109.12188), section 3.
    """

    grouping: Grouping
    project: Projection | None = None
    fitted: Fitted = None

    def __post_init__(self) -> None:
        if not isinstance(self.grouping, Grouping):
            raise TypeError(f"grouping: expected Distance, Buckets or Clusters, got {type(self.grouping).__name__}")
        if isinstance(self.grouping, Clusters):
            if not isinstance(self.fitted, Centroids):
                raise TypeError(
                    f"fitted: expected the Centroids of {self.grouping}, got {type(self.fitted).__name__}; use "
                    "Sparsefinder.selector"
                )
            check_space(self.project, self.fitted)
            if self.fitted.count != self.grouping.count * self.grouping.rounds:
                raise ValueError(f"fitted: expected count x rounds centroids for {self.grouping}, got {self.fitted}")
        else:
            check_space(self.project)
            if isinstance(self.fitted, Centroids) or (self.fitted is not None and not self._sorts):
                raise TypeError(f"fitted: expected nothing that {self.grouping} does not use, got {self.fitted}")
        if isinstance(self.fitted, Edges):
            self._check_edges(self.fitted)

    def _check_edges(self, edges: Edges) -> None:
        beta = self.grouping.beta if isinstance(self.grouping, Buckets) else 0
        for tensor in (edges.query, edges.key):
            if tensor.ndim != 3 or tensor.shape[2] != beta - 1 or tensor.shape != edges.query.shape:
                raise ValueError(f"fitted: expected edges (query heads, r, {beta - 1}), got {edges}")

    @property
    def _sorts(self) -> bool:
        return isinstance(self.grouping, Buckets) and self.grouping.kind == "equal_size"

    def select(self, inputs: Inputs) -> Graph:
        query, key = projected(inputs, self.project)
        if isinstance(self.fitted, Edges) and self.fitted.query.shape[:2] != (query.shape[1], query.shape[3]):
            raise ValueError(
                f"fitted: expected edges of {query.shape[1]} query heads in {query.shape[3]} dimensions, got "
                f"{self.fitted}; use the selector of the layer and model it was fitted on"
            )
        return self.grouping.graph(inputs, query, key, self.fitted)

    def covers(self, inputs: Inputs) -> bool:
        return self.grouping.joins_all

    @property
    def is_oracle(self) -> bool:  # type: ignore[override]
        return isinstance(self.grouping, Distance)

    @property
    def causal(self) -> bool:
        return not self._sorts or self.fitted is not None

    def expected_work(self, inputs: Inputs) -> tuple[float, float]:
        rank = inputs.head_dim if self.project is None else self.project.rank
        found, choose = self.grouping.work(inputs, rank)
        return found, (choose + (0.0 if self.project is None else 4.0 * rank * inputs.head_dim)) * inputs.groups

    def __str__(self) -> str:
        return f"{self.grouping}{' as they are' if self.project is None else f' in {self.project.rank} dimensions'}"
