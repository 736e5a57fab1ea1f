"""The arithmetic cost of a part of a plan, which every selector and every rest states."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from fewkeys.core.inputs import Inputs

PER_SCORE = 20
"""Operations that turn one score into a weight, counted like multiplications and additions."""
PER_SORTED = 20.0
"""Operations per key of sorting the keys."""


@dataclass(frozen=True)
class Work:
    """A model of the cost that does not depend on the data.

    Attributes:
        scores: the scores that a query's kept keys, or stand-ins, cost; a stand-in that costs more counts as more.
        choosing: operations per key, and key head, of choosing or summarising.
        scanned: operations per query of scanning all keys that it sees, so that they grow with the sequence.
        banded: whether kept keys lie in a band, each query's own, beside which stand-ins must be counted pair by pair.
        shared: further operations per key by the name of a statistic: what several parts ask for is computed once.
    """

    scores: float
    choosing: float = 0.0
    scanned: float = 0.0
    banded: bool = False
    shared: Mapping[str, float] = field(default_factory=dict)

    @property
    def per_key(self) -> float:
        """All operations per key."""
        return self.choosing + sum(self.shared.values())

    def __add__(self, other: Work) -> Work:
        scores, choosing = self.scores + other.scores, self.choosing + other.choosing
        scanned = self.scanned + other.scanned
        return Work(scores, choosing, scanned, self.banded or other.banded, {**self.shared, **other.shared})


def per_score(inputs: Inputs) -> float:
    """Operations of one score: the product with the query, the weight, the product with the value."""
    return 2 * (inputs.head_dim + inputs.value_dim) + PER_SCORE
