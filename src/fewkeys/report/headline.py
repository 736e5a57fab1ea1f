"""What a comparison says to do, in one sentence made of its figures."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from itertools import pairwise

from fewkeys.judge.result import Report, Row
from fewkeys.judge.standard import OURS

SMALL_ERROR = 0.1
"""The sentence names the plan with the fewest slots whose error is at most this."""


def headline(report: Report) -> str:
    """Up to which length exact attention is the right choice, and from which a plan is faster, at what error."""
    row = recommended(report)
    if row is None:
        return "No method stayed within its budget."
    return _of_lengths(report, row) if report.whole_times else _of_one_length(report, row)


def recommended(report: Report) -> Row | None:
    """The row that the sentence names: of those timed at several lengths, or else of the best at each budget, the one
    with the fewest slots and an error of at most `SMALL_ERROR`; if there is none, that with the least error.
    """
    timed = {(item.name, item.budget) for item in report.whole_times}
    rows = [row for row in report.rows if row.kind == "method" and (row.name, row.budget) in timed]
    if not timed:
        rows = [row for budget in report.settings["budgets"] or [None] if (row := report.best(budget)) is not None]
    small = [row for row in rows if row.error <= SMALL_ERROR]
    return min(small, key=lambda row: row.slots) if small else min(rows, key=lambda row: row.error, default=None)


def crossing(points: Sequence[tuple[float, float]]) -> float | None:
    """The length at which a ratio of times reaches 1, from (length, ratio) in order, interpolated between logarithms.

    None if all ratios lie on one side of 1.
    """
    for (length, ratio), (longer, higher) in pairwise(points):
        if ratio < 1 <= higher:
            below = max(ratio, sys.float_info.min)
            return float(length * (longer / length) ** (-math.log(below) / math.log(higher / below)))
    return None


def _of_lengths(report: Report, row: Row) -> str:
    times = report.times_of(row)
    first, last = times[0], times[-1]
    error = f"with an error of {_percent(row.error)} (measured at {report.length:,} tokens)"
    speed = f"{last.exact_ms / last.ms:.1f} times as fast at {last.length:,} tokens"
    where = crossing([(item.length, item.exact_ms / item.ms) for item in times])
    if where is not None:
        start = f"{float(f'{where:.2g}'):,.0f}"
        return (
            f"Up to about {start} tokens use exact attention; for longer texts {_name(row)} is faster, {error}: "
            f"{speed}."
        )
    if last.ms < last.exact_ms:
        return f"From {first.length:,} tokens on, {_name(row)} is faster than exact attention, {error}: {speed}."
    return f"Use exact attention up to {last.length:,} tokens: {_name(row)} is not faster there, {error}."


def _of_one_length(report: Report, row: Row) -> str:
    ratio = row.exact_ms / row.ms
    if ratio < 1:
        return (
            f"At {report.length:,} tokens use exact attention: {_name(row)}, with an error of {_percent(row.error)}, "
            f"takes {row.ms / row.exact_ms:.1f} times as long."
        )
    return (
        f"At {report.length:,} tokens, {_name(row)} is {ratio:.1f} times as fast as exact attention, with an error of "
        f"{_percent(row.error)}."
    )


def _name(row: Row) -> str:
    if row.name == OURS:
        return f"fk.budget({row.budget})"
    return row.name if row.budget is None else f"{row.name} with {row.budget} slots"


def _percent(error: float) -> str:
    return f"{100 * error:.0f} %" if error >= 0.02 else f"{100 * error:.1f} %"
