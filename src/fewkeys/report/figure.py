"""Error against slots for every row of a comparison: which plan to take, at a glance."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fewkeys.judge.result import Report, Row
from fewkeys.report.table import title

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

NOTHING = 1e-4
"""Errors below this are exact for every purpose; a logarithmic axis cannot show them, so they are left out."""


@dataclass(frozen=True)
class Look:
    """How one line is drawn."""

    color: str
    dash: Any = "-"
    width: float = 1.6
    marker: str = "o"


# Colours of Okabe and Ito, which colour-blind readers tell apart. Black: oracles. Grey: controls.
LOOKS = {
    "top-k per query (oracle)": Look("#000000", (0, (5, 2)), 1.8, "D"),
    "best shared columns (oracle)": Look("#000000", (0, (1, 1.6)), 1.6, "d"),
    "random keys": Look("#767676", "-", 1.3, "x"),
    "key norm": Look("#a3a3a3", "-", 1.3, "+"),
    "window": Look("#56b4e9", "-", 1.6, "s"),
    "sinks + window": Look("#0072b2", "-", 1.6, "s"),
    "leverage (LevAttention)": Look("#e69f00", "-", 1.6, "^"),
    "leverage (centred)": Look("#d55e00", "-", 1.6, "^"),
    "leverage + window": Look("#cc79a7", "-", 1.6, "v"),
    "moments": Look("#8a7400", "-", 1.6, "h"),
    "fewkeys budget": Look("#009e73", "-", 3.4, "o"),
}
OTHERS = ["#6a3d9a", "#b15928", "#1b7837", "#c51b7d", "#4d4d4d", "#2c7fb8"]
"""Colours of rows that are not standard, in turn."""


def save_figure(report: Report, path: str | os.PathLike[str]) -> None:
    """Draw mean output error (log) against slots used (log) and write it as PNG. Needs matplotlib.

    The drawing goes through no global state of matplotlib, so it works without a display and beside other plots.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.6, 6.0), dpi=150, facecolor="white")
    FigureCanvasAgg(figure)
    _draw(report, figure)
    figure.savefig(path, format="png", metadata={"Software": None})


def _draw(report: Report, figure: Figure) -> None:
    axes = figure.add_axes((0.075, 0.105, 0.66, 0.775))
    figure.text(0.075, 0.945, "Output error of attention with few keys", fontsize=14, weight="bold", va="baseline")
    figure.text(0.075, 0.905, title(report), fontsize=9.5, color="#555555", va="baseline")
    lines = _lines(report)
    for order, (name, rows) in enumerate(lines.items()):
        look = look_of(name, order)
        axes.plot(
            [row.slots for row in rows],
            [row.error for row in rows],
            color=look.color,
            linestyle=look.dash,
            linewidth=look.width,
            marker=look.marker,
            markersize=7 if look.width > 3 else 4.5,
            markeredgewidth=1.4 if look.marker in "x+" else 0.8,
            markeredgecolor=look.color if look.marker in "x+" else "white",
            zorder=4 if look.width > 3 else 3 if look.color == "#000000" else 2,
            solid_capstyle="round",
        )
    _axes(axes, [row for rows in lines.values() for row in rows])
    if lines:
        _labels(axes, figure, lines)
    else:
        axes.text(0.5, 0.5, "every plan is exact here", transform=axes.transAxes, ha="center", color="#555555")


def look_of(name: str, order: int) -> Look:
    """How the line of that name is drawn, `order` being its place among those shown."""
    return LOOKS.get(name) or Look(OTHERS[order % len(OTHERS)])


def _lines(report: Report) -> dict[str, list[Row]]:
    """The rows of each name that have an error to show, by slots."""
    lines: dict[str, list[Row]] = {}
    for row in sorted(report.rows, key=lambda row: row.slots):
        if row.error > NOTHING and row.slots > 0:
            lines.setdefault(row.name, []).append(row)
    return lines


def _axes(axes: Axes, rows: Sequence[Row]) -> None:
    """Logarithmic axes with plain numbers, horizontal guides, no frame."""
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xlabel("slots per query: keys attended exactly + price of the stand-ins", fontsize=10)
    axes.set_ylabel("mean relative output error", fontsize=10)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color("#999999")
    axes.grid(axis="y", which="major", color="#e4e4e4", linewidth=0.8)
    axes.set_axisbelow(True)
    if rows:
        low, high = min(row.slots for row in rows), max(row.slots for row in rows)
        low = min(low, high / 2)  # one budget alone is not stretched over the whole width
        axes.set_xlim(low / 1.12, high * 1.06)
        asked = sorted({row.budget for row in rows if row.budget is not None})
        marks = [float(mark) for mark in asked if low / 1.12 <= mark <= high * 1.06] or [low]
        axes.set_xticks(marks, [f"{mark:g}" for mark in marks])
        axes.set_xticks([], minor=True)
        bottom, top = min(row.error for row in rows) / 1.15, max(row.error for row in rows) * 1.15
        axes.set_ylim(bottom, top)
        steps = [m * 10.0**e for e in range(-4, 4) for m in (1, 2, 5)]
        steps = [step for step in steps if bottom <= step <= top]
        axes.set_yticks(steps, [f"{step:g}" for step in steps])
        axes.set_yticks([], minor=True)
    axes.tick_params(color="#999999", labelsize=9)


def _labels(axes: Axes, figure: Figure, lines: dict[str, list[Row]]) -> None:
    """Write each line's name beside its last point; where names would collide they move apart, with a thin leader."""
    import numpy as np

    names = list(lines)
    ends = [(rows[-1].slots, rows[-1].error) for rows in lines.values()]
    points = axes.transAxes.inverted().transform(axes.transData.transform(np.array(ends)))
    height = 0.037  # of a line of text, as a share of the axes
    places = spread([float(y) for y in points[:, 1]], height, 0.0, 1.0)
    for order, (name, (x, y), place) in enumerate(zip(names, points, places, strict=True)):
        look = look_of(name, order)
        axes.plot(
            [x + 0.012, 1.015, 1.045], [y, y, place], transform=axes.transAxes, clip_on=False, color=look.color,
            linewidth=0.7, alpha=0.55, zorder=1,
        )  # fmt: skip
        axes.text(
            1.052, place, name, transform=axes.transAxes, color=look.color, fontsize=9, va="center_baseline",
            weight="bold" if look.width > 3 else "normal",
        )  # fmt: skip


def spread(wanted: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """Places as near as possible to those `wanted`, in the same order, at least `gap` apart.

    The least squares answer: subtracting `gap` times the rank leaves a problem of isotonic regression, solved by
    pooling neighbours that are out of order. Places stay in [low, high] as far as there is room.
    """
    order = sorted(range(len(wanted)), key=lambda i: wanted[i])
    pools: list[tuple[float, int]] = []  # mean and size
    for rank, i in enumerate(order):
        pools.append((wanted[i] - gap * rank, 1))
        while len(pools) > 1 and pools[-2][0] > pools[-1][0]:
            (a, m), (b, n) = pools[-2:]
            pools[-2:] = [((a * m + b * n) / (m + n), m + n)]
    flat = [mean for mean, size in pools for _ in range(size)]
    top = max(low, high - gap * (len(wanted) - 1))
    places = [0.0] * len(wanted)
    for rank, i in enumerate(order):
        places[i] = min(max(flat[rank], low), top) + gap * rank
    return places
