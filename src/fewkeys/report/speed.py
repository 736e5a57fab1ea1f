"""A benchmark as a table and two pictures, PNG and PDF."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fewkeys.bench.timing import Timing
from fewkeys.report.figure import draw_lines
from fewkeys.report.headline import crossing
from fewkeys.report.style import label, logarithmic, save, say, sheet, upright
from fewkeys.report.table import show

DROP = ("quartiles", "heads")
NOTES = {
    "ms": "ms: median.",
    "exact / plan": "exact / plan: median of the ratios, turn by turn.",
    "quartiles": "quartiles: of these ratios.",
    "auto": "auto: what impl='auto' runs.",
}


def print_timings(rows: Sequence[Timing]) -> None:
    """Print a line for each plan and length."""
    print(show([_cells(row) for row in rows], notes=NOTES, drop=DROP))


def _cells(row: Timing) -> dict[str, str]:
    return {
        "plan": row.name,
        "tokens": f"{row.length:,}",
        "heads": str(row.heads),
        "ms": f"{row.ms:,.2f}",
        "exact / plan": f"{row.ratio:.2f}",
        "quartiles": f"{row.ratio_low:.2f}-{row.ratio_high:.2f}",
        "error": "" if row.error is None else f"{row.error:.3f}",
        "auto": row.auto,
    }


def save_pictures(rows: Sequence[Timing], settings: Mapping[str, Any], folder: Path) -> None:
    """Write time.png for two or more lengths, and error.png where errors were measured. settings: as in bench.json."""
    modes = (", causal" if settings["causal"] else "") + (", forward and backward" if settings["backward"] else "")
    title = f"{max(row.heads for row in rows)} heads, {settings['dtype']}{modes}"
    if len({row.length for row in rows}) > 1:
        _save_time(rows, folder / "time.png", title)
    if rows[0].error is not None:
        _save_error(rows, folder / "error.png", title)


def _save_time(rows: Sequence[Timing], path: Path, title: str) -> None:
    """Draw milliseconds per head against tokens, and mark where plans become faster."""
    figure, (axes,) = sheet("Time of attention", title, names=1.5)
    timings: dict[str, list[Timing]] = {}
    for row in sorted(rows, key=lambda row: row.length):
        timings.setdefault(row.name, []).append(row)
    lines = {name: [(row.length, row.ms / row.heads) for row in of_plan] for name, of_plan in timings.items()}
    say(axes, "tokens", "ms per head")
    looks = draw_lines(axes, lines, sorted({row.length for row in rows}))
    for name, of_plan in timings.items():
        start = crossing([(row.length, row.ratio) for row in of_plan])
        if start is not None:
            upright(axes, start, f"as fast as exact at {float(f'{start:.2g}'):,.0f} tokens", looks[name].color)
    save(figure, path)


def _save_error(rows: Sequence[Timing], path: Path, title: str) -> None:
    """Draw the mean relative output error against milliseconds at the greatest length.

    Plans called "name:slots" are one curve per name, with the slots at its points. Exact attention is a vertical line.
    """
    length = max(row.length for row in rows)
    figure, (axes,) = sheet(f"Error against time at {length:,} tokens", f"{title}; numbers: slots per query", names=1.5)
    last = sorted((row for row in rows if row.length == length), key=lambda row: row.ms)
    exact = next(row.ms for row in last if row.name == "exact")
    lines: dict[str, list[tuple[float, float]]] = {}
    for row in last:
        if row.error:
            name, _, slots = row.name.partition(":")
            lines.setdefault(name, []).append((row.ms, row.error))
            label(axes, slots, (row.ms, row.error), (6, 4), fontsize=8)
    say(axes, "ms", "mean relative output error")
    draw_lines(axes, lines)
    upright(axes, exact, "exact attention: error 0", "#000000", strong=True)
    logarithmic(axes, "x", [exact, *(row.ms for row in last if row.error)])
    save(figure, path)
