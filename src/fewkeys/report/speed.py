"""A benchmark as a table and two pictures: time against length, and error against milliseconds."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from fewkeys.bench.timing import Timing, growth
from fewkeys.report.console import Column, console, print_columns
from fewkeys.report.figure import OTHERS

DROP = {"quartiles": 1, "floor ms": 2, "prepare": 3, "heads": 4, "peak MB": 5}
"""Columns that narrower terminals leave to the JSON, in this order."""


def print_timings(rows: Sequence[Timing]) -> None:
    """Print one line per plan and length. Needs rich (`pip install fewkeys[report]`)."""
    screen = console()
    cells = [_cells(row) for row in rows]
    left = ("plan", "auto")
    print_columns(screen, [
        Column(name, [cell[name] for cell in cells], "left" if name in left else "right", DROP.get(name, 0))
        for name in cells[0]
    ])  # fmt: skip
    for name in dict.fromkeys(row.name for row in rows):
        exponent = growth(rows, name)
        if exponent is not None:
            screen.print(f"{name}: time grows with the power {exponent:.2f} of the length", markup=False)
    screen.print(
        "ms: median. exact / plan: median and quartiles of the ratios, turn by turn. prepare: share of selecting keys "
        "and making stand-ins. floor: the plan's arithmetic and bytes at the machine's measured rates.",
        style="dim",
        markup=False,
    )


def _cells(row: Timing) -> dict[str, str]:
    prepare = None if row.select_ms is None or row.prepare_ms is None else row.select_ms + row.prepare_ms
    whole = None if prepare is None or row.attend_ms is None else prepare + row.attend_ms
    return {
        "tokens": f"{row.length:,}",
        "heads": str(row.heads),
        "plan": row.name,
        "ms": f"{row.ms:,.2f}",
        "exact / plan": f"{row.ratio:.2f}",
        "quartiles": f"{row.ratio_low:.2f}-{row.ratio_high:.2f}",
        "prepare": "" if prepare is None or not whole else f"{prepare / whole:.0%}",
        "peak MB": "" if row.peak_bytes is None else f"{row.peak_bytes / 2**20:.0f}",
        "floor ms": f"{row.floor_ms:,.2f}",
        "error": "" if row.error is None else f"{row.error:.3f}",
        "auto": row.auto,
    }


def save_time(rows: Sequence[Timing], path: str | os.PathLike[str], *, title: str) -> None:
    """Milliseconds per head against tokens, both logarithmic; dotted: the floors. PNG, needs matplotlib."""
    figure, axes = _axes(f"Time of attention, {title}")
    for number, name in enumerate(dict.fromkeys(row.name for row in rows)):
        own = sorted((row for row in rows if row.name == name), key=lambda row: row.length)
        lengths = [row.length for row in own]
        color = "black" if name == "exact" else OTHERS[number % len(OTHERS)]
        axes.plot(lengths, [row.ms / row.heads for row in own], "o-", markersize=4, color=color, label=name)
        axes.plot(lengths, [row.floor_ms / row.heads for row in own], ":", linewidth=1, color=color)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(sorted({row.length for row in rows}), [f"{n:,}" for n in sorted({row.length for row in rows})])
    axes.set_xlabel("tokens")
    axes.set_ylabel("ms per head (dotted: floor)")
    axes.legend(frameon=False, fontsize="small")
    figure.savefig(path, format="png", dpi=150)


def save_error(rows: Sequence[Timing], path: str | os.PathLike[str], *, title: str) -> None:
    """Mean relative output error against milliseconds at the greatest length. PNG, needs matplotlib.

    Plans called "name:slots" are one curve per name. Exact attention is a vertical line: its error is zero.
    """
    length = max(row.length for row in rows)
    figure, axes = _axes(f"Error against time at {length:,} tokens, {title}")
    last = [row for row in rows if row.length == length and row.error is not None]
    methods = dict.fromkeys(row.name.partition(":")[0] for row in last if row.name != "exact")
    for number, method in enumerate(methods):
        own = sorted((row for row in last if row.name.partition(":")[0] == method), key=lambda row: row.ms)
        wide = 3.0 if method == "budget" else 1.4
        color = "#009e73" if method == "budget" else OTHERS[number % len(OTHERS)]
        points = [row.ms for row in own], [row.error for row in own]
        axes.plot(*points, "o-", linewidth=wide, markersize=5, color=color, label=method)
    exact = next(row for row in rows if row.length == length and row.name == "exact")
    axes.axvline(exact.ms, color="black", linestyle="--", label="exact attention (error 0)")
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("ms")
    axes.set_ylabel("mean relative output error")
    axes.legend(frameon=False, fontsize="small")
    figure.savefig(path, format="png", dpi=150)


def _axes(title: str) -> tuple[Any, Any]:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5.4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    axes.set_title(title, loc="left")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25)
    return figure, axes
