"""The arithmetic cost of selectors and rests, and how much of it is done at a time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

from fewkeys.core.inputs import Inputs

PER_SCORE, PER_SORTED = 20, 20.0
"""Operations that turn one score into a weight, and operations per key of sorting the keys."""


@dataclass(frozen=True)
class Work:
    """A model of the cost that does not depend on the data.

    scores: per query, of kept keys or stand-ins; a stand-in that costs more counts as more. choosing: operations per
    key, and key head, of choosing or summarising. scanned: operations per query of scanning all keys that it sees.
    banded: whether kept keys are in a band, beside which stand-ins must be counted pair by pair. shared: further
    operations per key, by the statistic that several parts may ask for.
    """

    scores: float
    choosing: float = 0.0
    scanned: float = 0.0
    banded: bool = False
    shared: Mapping[str, float] = field(default_factory=dict)

    @property
    def per_key(self) -> float:
        return self.choosing + sum(self.shared.values())

    def __add__(self, other: Work) -> Work:
        return Work(
            self.scores + other.scores,
            self.choosing + other.choosing,
            self.scanned + other.scanned,
            self.banded or other.banded,
            {**self.shared, **other.shared},
        )


def per_score(inputs: Inputs) -> float:
    """Operations of one score: products with query and value, and the weight."""
    return 2 * (inputs.head_dim + inputs.value_dim) + PER_SCORE


def at_once(tensor: Tensor) -> int:
    """How many numbers are computed at once: 16 MB in float32 on a CPU, and 256 MB on a GPU, which starts a small piece
    more slowly than it computes it.
    """
    return 2**22 if tensor.device.type == "cpu" else 2**26
