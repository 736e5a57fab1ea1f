"""Rules that share a budget of slots among outliers, a window, means and a rank."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from math import sqrt

import fewkeys as fk

COHORTS = (8, 16, 32, 64)
MOST_COHORTS, COHORT_SLOTS = 64, 4096
"""As many cohorts as have so many slots together, at most so many."""


@dataclass(frozen=True)
class Cell:
    """The numbers of one plan."""

    outliers: int
    window: int
    means: int
    rank: int
    cohorts: int

    def __str__(self) -> str:
        return f"{self.outliers}, {self.window}, {self.means}, {self.rank}, {self.cohorts}"

    def plan(self) -> fk.Plan:
        """The plan itself, which never gives way to exact attention."""
        keep = fk.Outliers(self.outliers, self.means, cohorts=self.cohorts)
        rest = fk.ClusterMeans(self.means, self.rank, self.cohorts)
        return fk.Plan(keep | fk.Window(self.window) if self.window else keep, rest)


@dataclass(frozen=True)
class Part:
    """`share * slots` or, with `root`, `share * sqrt(slots)` slots."""

    share: float
    root: bool = False

    def of(self, slots: int) -> float:
        """So many of the slots."""
        return self.share * (sqrt(slots) if self.root else slots)

    def __str__(self) -> str:
        return f"{self.share:g} {'root' if self.root else 'slots'}" if self.share else "0"


@dataclass(frozen=True)
class Rule:
    """Outliers, window and rank as parts of the slots, the window odd; means are what is left. A rank of one is none:
    its factors cost as much as it does.
    """

    outliers: Part
    window: Part
    rank: Part

    def cell(self, slots: int, cohorts: int) -> Cell | None:
        """The plan's numbers; None where no slot is left for a mean. Factors cost a slot in 128, and one."""
        outliers, rank = max(1, int(self.outliers.of(slots))), int(self.rank.of(slots))
        window = (int(self.window.of(slots)) + 1) // 2 * 2 - 1 if self.window.share else 0
        rank = rank if rank > 1 else 0
        means = slots - outliers - window - rank - (1 + slots // 128 if rank else 0)
        return Cell(outliers, window, means, rank, cohorts) if means > 0 and window >= 0 else None

    def __str__(self) -> str:
        return f"outliers {self.outliers}, window {self.window}, rank {self.rank}"


def cohorts_of(slots: int) -> int:
    """How many cohorts a budget has."""
    return 1 << min(MOST_COHORTS, max(1, COHORT_SLOTS // slots)).bit_length() - 1


OUTLIERS = Part(3 / 8), Part(7 / 16), Part(1 / 2), Part(5 / 8)
WINDOWS = Part(1 / 5), Part(1.0, root=True), Part(1.5, root=True), Part(2.0, root=True)
RANKS = Part(1 / 16), Part(1 / 8), Part(0.5, root=True)
RULES = [Rule(*parts) for parts in product(OUTLIERS, WINDOWS, RANKS)]
"""The rules among which one is chosen."""
WITHOUT_WINDOW = Rule(Part(9 / 16), Part(0.0), Part(1 / 8))
"""Cohorts without a window."""


def cells(slots: int) -> list[Cell]:
    """Every plan of so many slots that is tried, each once: all rules at the budget's own number of cohorts, and all
    shares of outliers beside a window of 1.5 roots and a rank of a sixteenth at other numbers.
    """
    tried = [(rule, cohorts_of(slots)) for rule in RULES]
    tried += [
        (rule, cohorts)
        for rule, cohorts in product(RULES, COHORTS)
        if rule.window == WINDOWS[2] and rule.rank == RANKS[0]
    ]
    return [cell for cell in dict.fromkeys(rule.cell(slots, cohorts) for rule, cohorts in tried) if cell is not None]
