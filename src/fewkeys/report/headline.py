"""The recommendation of a comparison in one sentence."""

import math
import sys
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

from fewkeys.judge.result import Report, Row, WholeTime
from fewkeys.judge.standard import CONTROLS, OURS

SMALL_ERROR = 0.1
DISTURBED = " Other programs ran meanwhile, so these times may be wrong: measure again when the machine is quiet."


def headline(report: Report) -> str:
    """From which length a plan is faster than exact attention, and at what error."""
    row = recommended(report)
    if row is None:
        return "No method stayed within its budget."
    own = WholeTime(row.name, row.budget, report.length, 1, row.ms, row.exact_ms)
    times, name = report.times_of(row) or [own], _name(row)
    first, last = times[0], times[-1]
    percent = f"{100 * row.error:.{0 if row.error >= 0.02 else 1}f} %"
    error = f"with an error of {percent} (measured at {report.length:,} tokens)"
    speed = f"{last.exact_ms / last.ms:.1f} times as fast at {last.length:,} tokens"
    start = crossing([(item.length, item.exact_ms / item.ms) for item in times])
    if start is not None:
        until = f"Up to about {float(f'{start:.2g}'):,.0f} tokens use exact attention"
        sentence = f"{until}; for longer texts {name} is faster, {error}: {speed}."
    elif last.ms < last.exact_ms:
        sentence = f"From {first.length:,} tokens on, {name} is faster than exact attention, {error}: {speed}."
    else:
        sentence = f"Use exact attention up to {last.length:,} tokens. {name} is not faster there; it comes {error}."
    return sentence + (DISTURBED if report.settings.get("disturbed") else "")


def recommended(report: Report) -> Row | None:
    """The row with the fewest slots and an error of at most `SMALL_ERROR`, or else with the least error, among those
    timed at several lengths; without such times, among the best of each budget but controls.
    """
    rows = [row for row in report.rows if row.kind == "method" and report.times_of(row)]
    if not report.whole_times:
        methods = replace(report, rows=[row for row in report.rows if row.name not in CONTROLS])
        rows = [row for budget in report.settings["budgets"] or [None] if (row := methods.best(budget)) is not None]
    small = [row for row in rows if row.error <= SMALL_ERROR]
    return min(small, key=lambda row: row.slots) if small else min(rows, key=lambda row: row.error, default=None)


def crossing(points: Sequence[tuple[float, float]]) -> float | None:
    """The length, by logarithms, at which a ratio rises to 1 for good, given (length, ratio) in order, or None."""
    for (length, ratio), (longer, higher) in reversed(list(pairwise(points))):
        if higher < 1:
            break
        if ratio < 1:
            below = max(ratio, sys.float_info.min)
            return float(length * (longer / length) ** (-math.log(below) / math.log(higher / below)))
    return None


def _name(row: Row) -> str:
    if row.name == OURS:
        return f"fk.budget({row.budget})"
    return row.name if row.budget is None else f"{row.name} with {row.budget} slots"
