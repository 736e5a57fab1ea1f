"""What every selector is: a frozen rule that turns a problem into the edges it keeps."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from fewkeys.core.graph import Columns, Graph
from fewkeys.core.inputs import Inputs
from fewkeys.core.validation import check_inputs

if TYPE_CHECKING:
    from fewkeys.select.causal import OnlineScore

CAUSAL_BLOCK = 32
"""Queries that share one list of causally chosen keys: the list is renewed at every such block."""


class Selector(ABC):
    """A rule that says which keys each query attends to exactly. `a | b` keeps what either keeps."""

    is_oracle: ClassVar[bool] = False
    """Whether the rule scores every pair, so that it costs as much as exact attention."""

    @abstractmethod
    def select(self, inputs: Inputs) -> Graph:
        """The edges kept on a validated problem. No gradient flows through the choice."""

    @abstractmethod
    def covers(self, inputs: Inputs) -> bool:
        """Whether every visible key is kept whatever the data, so that the plan is exact attention."""

    @property
    def causal(self) -> bool:
        """Whether the rule is defined, and strictly causal, under `is_causal=True`."""
        return True

    def expected_work(self, inputs: Inputs) -> tuple[float, float] | None:
        """Scores that a query's kept keys cost, and operations per key of choosing them, before the data is read.

        Rules whose `count` is no number of keys (clusters, buckets) must say so here; None leaves it to
        `fewkeys.cost.operations`, which knows the others.
        """
        return None

    def online(self, generator: torch.Generator | None) -> OnlineScore:
        """The scores by which the rule chooses among keys as they arrive. Only rules that keep the best so far have it.

        `generator` is where rules that draw draw from.
        """
        raise ValueError(f"keep: expected a rule that can choose among keys as they arrive, got {self}")

    def graph(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor | None = None,
        *,
        is_causal: bool = False,
        scale: float | None = None,
        lengths: Tensor | None = None,
        key_mask: Tensor | None = None,
        query_offset: int = 0,
        generator: torch.Generator | None = None,
    ) -> Graph:
        """The graph for queries (B, Hq, Nq, D) and keys (B, Hkv, Nk, D); arguments as in `fewkeys.attention`.

        Only `Outliers` looks at the values; without them it takes the keys for values.
        """
        inputs = check_inputs(
            query,
            key,
            key if value is None else value,
            is_causal=is_causal,
            scale=scale,
            lengths=lengths,
            key_mask=key_mask,
            query_offset=query_offset,
            generator=generator,
        )
        return self.select(inputs)

    def __or__(self, other: Selector) -> Selector:
        if not isinstance(other, Selector):
            raise TypeError(f"keep: expected a selector on both sides of |, got {type(other).__name__}")
        return Union((*_parts(self), *_parts(other)))


@dataclass(frozen=True)
class Union(Selector):
    """Everything that any of `parts` keeps; an edge kept twice counts once."""

    parts: tuple[Selector, ...]

    def select(self, inputs: Inputs) -> Graph:
        graph = self.parts[0].select(inputs)
        for part in self.parts[1:]:
            graph = graph | part.select(inputs)
        return graph

    def covers(self, inputs: Inputs) -> bool:
        return any(part.covers(inputs) for part in self.parts)

    @property
    def is_oracle(self) -> bool:  # type: ignore[override]
        return any(part.is_oracle for part in self.parts)

    @property
    def causal(self) -> bool:
        return all(part.causal for part in self.parts)

    def __str__(self) -> str:
        return " | ".join(str(part) for part in self.parts)


def _parts(selector: Selector) -> tuple[Selector, ...]:
    return selector.parts if isinstance(selector, Union) else (selector,)


def shared_top(inputs: Inputs, score: Tensor, count: int) -> Graph:
    """All queries keep the `count` valid keys of largest `score` (B, Hkv, Nk)."""
    if inputs.valid is not None:
        score = score.masked_fill(~inputs.valid[:, None], -torch.inf)
    top = score.topk(min(count, inputs.keys), -1)
    # Sorted positions: the order in which equal sums are added must not depend on the scores.
    index, order = top.indices.sort(-1)
    used = (top.values > -torch.inf).gather(-1, order)
    return Graph(inputs, columns=Columns.shared(index, used, inputs.queries))
