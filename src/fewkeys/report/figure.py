"""The figure of a comparison: error against slots for every row."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from fewkeys.judge.result import Report
from fewkeys.judge.row import Row
from fewkeys.report.style import OTHERS, Look, draw, logarithmic, name_lines, save, say, sheet
from fewkeys.report.table import title

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NOTHING = 1e-4
"""Smaller errors count as exact and are left out: a logarithmic axis cannot show zero."""

# Colours of Okabe and Ito, which colour-blind readers tell apart. Wine, dashed: oracles. Grey: controls. Black is that
# of exact attention.
LOOKS = {
    "top-k per query (oracle)": Look("#882255", (0, (5, 2)), 1.8, "D"),
    "best shared columns (oracle)": Look("#b5739d", (0, (1, 1.6)), 1.6, "d"),
    "random keys": Look("#767676", "-", 1.3, "x"),
    "key norm": Look("#a3a3a3", "-", 1.3, "+"),
    "window": Look("#56b4e9", "-", 1.6, "s"),
    "sinks + window": Look("#0072b2", "-", 1.6, "s"),
    "leverage (LevAttention)": Look("#e69f00", "-", 1.6, "^"),
    "leverage (centred)": Look("#d55e00", "-", 1.6, "^"),
    "leverage + window": Look("#cc79a7", "-", 1.6, "v"),
    "fewkeys budget": Look("#009e73", "-", 3.4, "o"),
}


def save_figure(report: Report, path: str | os.PathLike[str]) -> None:
    """Write the figure of a report as PNG and PDF. Needs matplotlib."""
    save(figure_of(report), path)


def figure_of(report: Report) -> Figure:
    """Mean output error (log) against slots used (log), a line for every name."""
    figure, (axes,) = sheet("Output error of attention with few keys", title(report))
    lines = _lines(report)
    looks = {name: look_of(name, order) for order, name in enumerate(lines)}
    for name, rows in lines.items():
        draw(axes, [row.slots for row in rows], [row.error for row in rows], looks[name])
    say(axes, "slots per query: keys attended exactly + price of the stand-ins", "mean relative output error")
    if lines:
        shown = [row for rows in lines.values() for row in rows]
        slots = [row.slots for row in shown]
        # A single budget is not stretched over the whole width.
        ends = [min(*slots, max(slots) / 2), max(slots)]
        budgets = sorted({float(row.budget) for row in shown if row.budget is not None})
        logarithmic(axes, "x", ends, budgets or [min(slots)])
        logarithmic(axes, "y", [row.error for row in shown])
        name_lines(axes, {name: (rows[-1].slots, rows[-1].error) for name, rows in lines.items()}, looks)
    else:
        axes.text(0.5, 0.5, "every plan is exact here", transform=axes.transAxes, ha="center", color="#555555")
    return figure


def look_of(name: str, order: int) -> Look:
    """The style of the line with that name; `order`: its place among the lines shown."""
    return LOOKS.get(name) or Look(OTHERS[order % len(OTHERS)])


def _lines(report: Report) -> dict[str, list[Row]]:
    """The rows with an error above `NOTHING` by name, sorted by slots."""
    lines: dict[str, list[Row]] = {}
    for row in sorted(report.rows, key=lambda row: row.slots):
        if row.error > NOTHING and row.slots > 0:
            lines.setdefault(row.name, []).append(row)
    return lines
