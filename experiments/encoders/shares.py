"""Rules that share a budget of slots among outliers, a window, means and a rank."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from math import sqrt

import fewkeys as fk

COHORTS = (8, 16, 32, 64)
MOST_COHORTS, COHORT_SLOTS = 64, 4096
"""At most 64 cohorts, which have 4,096 slots together at most."""


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
        """The plan, which never gives way to exact attention."""
        keep = fk.Outliers(self.outliers, self.means, cohorts=self.cohorts)
        rest = fk.ClusterMeans(self.means, self.rank, self.cohorts)
        return fk.Plan(keep | fk.Window(self.window) if self.window else keep, rest)


@dataclass(frozen=True)
class Part:
    """`share * slots` or, with `root`, `share * sqrt(slots)` slots, at most `most`."""

    share: float
    root: bool = False
    most: int = 512

    def of(self, slots: int) -> float:
        """This part of the slots, as a number."""
        return min(self.share * (sqrt(slots) if self.root else slots), self.most)

    def __str__(self) -> str:
        most = f", at most {self.most}" if self.most < 512 else ""
        return f"{self.share:g} {'root' if self.root else 'slots'}{most}" if self.share else "0"


@dataclass(frozen=True)
class Rule:
    """A window, odd, and a rank as parts of the slots; `outliers` is a share of the slots that the window leaves; means
    are the rest. A rank of one counts as none: its factors cost as many slots as the rank.
    """

    outliers: float
    window: Part
    rank: Part

    def cell(self, slots: int, cohorts: int) -> Cell | None:
        """The plan's numbers; None where no slot is left for a mean. Factors cost a slot in 128, and one."""
        rank = int(self.rank.of(slots))
        window = int(self.window.of(slots)) | 1 if self.window.share else 0
        outliers = max(1, int(self.outliers * (slots - window)))
        rank = rank if rank > 1 else 0
        means = slots - outliers - window - rank - (1 + slots // 128 if rank else 0)
        return Cell(outliers, window, means, rank, cohorts) if means > 0 else None

    def __str__(self) -> str:
        return f"outliers {self.outliers:g}, window {self.window}, rank {self.rank}"


def cohorts_of(slots: int) -> int:
    """The number of cohorts of a budget."""
    return 1 << min(MOST_COHORTS, max(1, COHORT_SLOTS // slots)).bit_length() - 1


OUTLIERS = 3 / 8, 1 / 2, 9 / 16, 5 / 8
WINDOWS = Part(1 / 5), *(Part(share, root=True) for share in (0.75, 1.0, 1.25, 1.5, 2.0))
RANKS = Part(1 / 16), Part(1 / 8, most=4), Part(1 / 8, most=8), Part(3 / 4, root=True, most=8)
RULES = [Rule(*parts) for parts in product(OUTLIERS, WINDOWS, RANKS)]
"""The rules to choose from."""
MIDDLE = Rule(9 / 16, WINDOWS[3], RANKS[2])
"""The rule that is tried with other numbers of cohorts."""
WITHOUT_WINDOW = Rule(9 / 16, Part(0.0), Part(1 / 8))
"""Cohorts without a window."""


def cells(slots: int) -> list[Cell]:
    """Every plan with `slots` slots that is tried, each once: all rules with the budget's number of cohorts, and one
    rule with other numbers.
    """
    tried = [(rule, cohorts_of(slots)) for rule in RULES] + [(MIDDLE, cohorts) for cohorts in COHORTS]
    return [cell for cell in dict.fromkeys(rule.cell(slots, cohorts) for rule, cohorts in tried) if cell is not None]
