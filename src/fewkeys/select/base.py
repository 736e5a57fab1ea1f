"""The base of selectors."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple, Unpack

import torch
from torch import Tensor

from fewkeys.core.catalogue import Listed
from fewkeys.core.graph import Columns, Graph
from fewkeys.core.inputs import Inputs
from fewkeys.core.precision import full_precision
from fewkeys.core.rows import marked_places
from fewkeys.core.validation import Options, check_count, check_inputs
from fewkeys.core.work import Work


class Recent(NamedTuple):
    """The block of `size` positions that contains the query, and the `blocks - 1` blocks before it."""

    size: int
    blocks: int


@dataclass(frozen=True)
class Remembered:
    """The part of the past that a causal rule may still read: the `latest` keys, counted from the query's own place;
    `recent` blocks of positions, evicted at once; the `first` real keys; all keys, for a `scan` that chooses so many.
    """

    latest: int = 0
    recent: Recent | None = None
    first: int = 0
    scan: int = 0


@dataclass(frozen=True)
class Sharded:
    """How a rule chooses keys for all queries: the `count` largest scores, or all of at least `least`. `score` gives
    those (B, Hkv, N) of the keys of `inputs`, which may be a part of `inputs.whole`.
    """

    score: Callable[[Inputs], Tensor]
    count: int | None = None
    least: float = 0.0

    def graph(self, inputs: Inputs) -> Graph:
        """The edges if all keys are here."""
        score = self.score(inputs)
        if self.count is not None:
            return shared_top(inputs, score, self.count)
        marked = of_valid(inputs, score) >= self.least
        index = marked_places(marked, least=1)
        return Graph(inputs, columns=Columns.shared(index, marked.gather(-1, index), inputs.queries))


class Selector(Listed, ABC):
    """A rule that says which keys each query attends to exactly. `a | b` keeps what either keeps.

    What is not abstract has a safe default.
    """

    is_oracle: ClassVar[bool] = False
    """Whether the rule scores every pair, at the cost of exact attention."""
    beside_cohorts: ClassVar[bool] = False
    """Whether the rule may be combined with lists of cohorts: it chooses by position alone."""

    @abstractmethod
    def select(self, inputs: Inputs) -> Graph:
        """The kept edges. No gradient flows through the choice."""

    def beside(self, inputs: Inputs, kept: Graph) -> Graph:
        """`kept` and the edges of the rule, which may depend on `kept`."""
        return kept | self.select(inputs)

    @abstractmethod
    def covers(self, inputs: Inputs) -> bool:
        """Whether every visible key is kept whatever the data: exact attention."""

    @property
    def cohort_lists(self) -> int:
        """How many cohorts of queries have lists of their own."""
        return 1

    @property
    def causal(self) -> bool:
        """Whether the rule is strictly causal under `is_causal=True`; `check_causal` tries it."""
        return False

    @abstractmethod
    def work(self, inputs: Inputs) -> Work:
        """The cost of choosing and attending."""

    @property
    def parts(self) -> tuple[Selector, ...]:
        """The rules that are united."""
        return (self,)

    @property
    def remembered(self) -> Remembered | None:
        """What a stream must hold; None: the rule may read any key, or is not causal."""
        return None

    @property
    def scanned(self) -> int:
        """How many keys each query chooses by a scan of all keys; 0 without one."""
        return max((past.scan for part in self.parts if (past := part.remembered) is not None), default=0)

    @property
    def sharded(self) -> Sharded | None:
        """How the rule chooses, also over processes, by a score of each key; None: it does not."""
        return None

    def graph(self, query: Tensor, key: Tensor, value: Tensor | None = None, **options: Unpack[Options]) -> Graph:
        """The graph for queries (B, Hq, Nq, D) and keys (B, Hkv, Nk, D); arguments as in `fewkeys.attention`.

        Only `Outliers` looks at the values; None: the keys. Places include padding.
        """
        inputs = check_inputs(query, key, key if value is None else value, **options)
        with full_precision():
            return self.select(inputs)

    def check_causal(self, query: Tensor, key: Tensor, value: Tensor | None = None) -> None:
        """Raise `ValueError` where a query keeps a later key, or later tokens change what it keeps: a test of rules.

        As many queries as keys; else as `graph`. Cost O(n^2).
        """
        value = key if value is None else value
        name, before = type(self).__name__, self.graph(query, key, value, is_causal=True).to_mask()
        if bool(before.triu(1).any()):
            raise ValueError(f"causal: expected {name} to keep no key after the query's own, got one that it keeps")
        for first in sorted({1, key.shape[2] // 2, key.shape[2] - 1} & set(range(1, key.shape[2]))):
            later = [rows.clone() for rows in (query, key, value)]
            for rows in later:
                rows[:, :, first:] = 5 - 3 * rows[:, :, first:]
            after = self.graph(*later, is_causal=True).to_mask()
            if not torch.equal(after[:, :, :first], before[:, :, :first]):
                raise ValueError(f"causal: expected {name} to choose without tokens from {first} on for queries before")

    def __or__(self, other: Selector) -> Selector:
        if not isinstance(other, Selector):
            raise TypeError(f"keep: expected a selector on both sides of |, got {type(other).__name__}")
        return Union((*self.parts, *other.parts))


@dataclass(frozen=True)
class CountedSelector(Selector, ABC, listed=False):
    """A rule that keeps `count` keys."""

    count: int

    def __post_init__(self) -> None:
        check_count(f"{type(self).__name__} count", self.count)

    def covers(self, inputs: Inputs) -> bool:
        return self.count >= inputs.keys


@dataclass(frozen=True)
class Union(Selector, listed=False):
    """Everything that any of `members` keeps."""

    members: tuple[Selector, ...]

    def __post_init__(self) -> None:
        for part in self.parts:
            others = [other for other in self.parts if other is not part and not other.beside_cohorts]
            if part.cohort_lists > 1 and others:
                raise ValueError(
                    f"keep: expected Window and Sinks alone beside {part}, got {others[0]}; use cohorts=1 there"
                )

    @property
    def cohort_lists(self) -> int:
        return max(part.cohort_lists for part in self.parts)

    @property
    def parts(self) -> tuple[Selector, ...]:
        return tuple(part for member in self.members for part in member.parts)

    def select(self, inputs: Inputs) -> Graph:
        # Lists of cohorts are chosen last: they leave out the keys of a band.
        first, *others = sorted(self.members, key=lambda member: member.cohort_lists)
        graph = first.select(inputs)
        for member in others:
            graph = member.beside(inputs, graph)
        return graph

    def covers(self, inputs: Inputs) -> bool:
        return any(member.covers(inputs) for member in self.members)

    def work(self, inputs: Inputs) -> Work:
        return sum((member.work(inputs) for member in self.members), Work(0.0))

    @property
    def is_oracle(self) -> bool:  # type: ignore[override]
        return any(member.is_oracle for member in self.members)

    @property
    def causal(self) -> bool:
        return all(member.causal for member in self.members)

    def __str__(self) -> str:
        return " | ".join(str(member) for member in self.members)


def united(parts: Sequence[Selector]) -> Selector:
    """`Union(parts)`, or the only part."""
    return parts[0] if len(parts) == 1 else Union(tuple(parts))


def shared_top(inputs: Inputs, score: Tensor, count: int) -> Graph:
    """All queries keep the `count` valid keys of largest `score` (B, Hkv, Nk)."""
    index, used = top_places(of_valid(inputs, score), count)
    return Graph(inputs, columns=Columns.shared(index, used, inputs.queries))


def of_valid(inputs: Inputs, score: Tensor) -> Tensor:
    """Scores (B, Hkv, Nk), -inf for padding."""
    return score if inputs.valid is None else score.masked_fill(~inputs.valid[:, None], -torch.inf)


def top_places(score: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The places of the `count` largest scores (..., N), ascending, and which of them are above -inf."""
    top = score.topk(min(count, score.shape[-1]), -1)
    # The order of summation must not depend on the scores.
    index, order = top.indices.sort(-1)
    return index, (top.values > -torch.inf).gather(-1, order)
