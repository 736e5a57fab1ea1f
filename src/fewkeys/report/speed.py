"""A benchmark as a table and two pictures: time against length, and error against milliseconds."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from fewkeys.bench.timing import Timing, growth
from fewkeys.report.console import Column, console, print_columns
from fewkeys.report.headline import crossing
from fewkeys.report.style import OTHERS, Look, draw, halo, logarithmic, name_lines, save, say, sheet, upright

DROP = {"quartiles": 1, "floor ms": 2, "prepare": 3, "heads": 4, "peak MB": 5}
"""Columns that narrow terminals leave out, in this order; the JSON has them."""

NOTES = {
    "ms": "median.",
    "exact / plan": "median of the ratios, turn by turn.",
    "quartiles": "of these ratios.",
    "prepare": "share of selecting keys and making stand-ins.",
    "peak MB": "what the plan's tensors hold beyond the inputs.",
    "floor ms": "the plan's arithmetic and bytes at the machine's measured rates.",
    "auto": "what impl='auto' runs.",
}


def print_timings(rows: Sequence[Timing]) -> None:
    """Print one line per plan and length. Needs rich (`pip install fewkeys[report]`)."""
    screen = console()
    cells = [_cells(row) for row in rows]
    left = ("plan", "auto")
    shown = print_columns(screen, [
        Column(name, [cell[name] for cell in cells], "left" if name in left else "right", DROP.get(name, 0))
        for name in cells[0]
    ])  # fmt: skip
    for name in dict.fromkeys(row.name for row in rows):
        exponent = growth(rows, name)
        if exponent is not None:
            screen.print(f"{name}: time grows with the power {exponent:.2f} of the length", markup=False)
    explained = " ".join(f"{name}: {note}" for name, note in NOTES.items() if name in shown)
    screen.print(explained, style="dim", markup=False)


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


def headline(settings: Mapping[str, Any], heads: int) -> str:
    """A line that says what was timed, from the settings in bench.json."""
    modes = (", causal" if settings["causal"] else "") + (", forward and backward" if settings["backward"] else "")
    return f"{heads} heads, {settings['dtype']}{modes}"


def save_time(rows: Sequence[Timing], path: str | os.PathLike[str], *, title: str) -> None:
    """Milliseconds per head against tokens, both logarithmic. PNG, needs matplotlib.

    Dotted lines are the floors; a vertical line marks the length from which a plan is faster than exact attention.
    """
    figure, (axes,) = sheet("Time of attention", f"{title}; dotted: what the machine could do at best", names=1.5)
    lines = {name: _of(rows, name) for name in dict.fromkeys(row.name for row in rows)}
    looks = {name: _look(name, number) for number, name in enumerate(lines)}
    for name, timings in lines.items():
        lengths = [row.length for row in timings]
        draw(axes, lengths, [row.ms / row.heads for row in timings], looks[name])
        axes.plot(lengths, [row.floor_ms / row.heads for row in timings], ":", linewidth=1, color=looks[name].color)
        where = crossover(rows, name)
        if where is not None:
            upright(axes, where, f"as fast as exact at {float(f'{where:.2g}'):,.0f} tokens", looks[name].color)
    say(axes, "tokens", "ms per head")
    lengths = sorted({row.length for row in rows})
    logarithmic(axes, "x", lengths, lengths)
    logarithmic(axes, "y", [time / row.heads for row in rows for time in (row.ms, row.floor_ms) if time > 0])
    name_lines(
        axes, {name: (timings[-1].length, timings[-1].ms / timings[-1].heads) for name, timings in lines.items()}, looks
    )
    save(figure, path)


def crossover(rows: Sequence[Timing], name: str) -> float | None:
    """The length from which the plan is faster than exact attention, interpolated between logarithms.

    None if it is faster, or slower, at every length.
    """
    if name == "exact":
        return None
    return crossing([(row.length, row.ratio) for row in _of(rows, name)])


def save_error(rows: Sequence[Timing], path: str | os.PathLike[str], *, title: str) -> None:
    """Mean relative output error against milliseconds at the greatest length. PNG, needs matplotlib.

    Plans called "name:slots" are one curve per name, with the slots at its points. Exact attention is a vertical line:
    its error is zero.
    """
    length = max(row.length for row in rows)
    figure, (axes,) = sheet(
        f"Error against time at {length:,} tokens", f"{title}; numbers are slots per query", names=1.5
    )
    last = [row for row in rows if row.length == length and row.error is not None]
    lines: dict[str, list[Timing]] = {}
    for row in sorted(last, key=lambda row: row.ms):
        if row.name != "exact":
            lines.setdefault(row.name.partition(":")[0], []).append(row)
    looks = {name: _look(name, number) for number, name in enumerate(lines)}
    for name, timings in lines.items():
        draw(axes, [row.ms for row in timings], [row.error or 0.0 for row in timings], looks[name])
        for row in timings:
            axes.annotate(
                row.name.partition(":")[2], (row.ms, row.error or 0.0), xytext=(6, 4), textcoords="offset points",
                fontsize=8, color=looks[name].color, zorder=5, path_effects=halo(),
            )  # fmt: skip
    exact = next(row for row in rows if row.length == length and row.name == "exact")
    upright(axes, exact.ms, "exact attention: error 0", "#000000", strong=True)
    say(axes, "ms", "mean relative output error")
    logarithmic(axes, "x", [exact.ms, *(row.ms for timings in lines.values() for row in timings)])
    logarithmic(axes, "y", [row.error or 1.0 for timings in lines.values() for row in timings] or [1.0])
    ends = {name: (timings[-1].ms, timings[-1].error or 0.0) for name, timings in lines.items()}
    name_lines(axes, ends, looks)
    save(figure, path)


def _of(rows: Sequence[Timing], name: str) -> list[Timing]:
    return sorted((row for row in rows if row.name == name), key=lambda row: row.length)


def _look(name: str, number: int) -> Look:
    """As in `fewkeys.report.figure`: the recommended plan is green and broad, exact attention is black."""
    method = name.partition(":")[0]
    if method == "exact":
        return Look("#000000", "-", 1.8, "D")
    return Look("#009e73", "-", 3.4) if method == "budget" else Look(OTHERS[number % len(OTHERS)])
