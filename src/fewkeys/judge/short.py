"""A report in a few lines, for `print(report)` and for notebooks; `fewkeys.report` shows all of it."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from fewkeys.core.clock import in_words
from fewkeys.judge.pareto import front
from fewkeys.judge.row import Row, Skipped

HEAD = ("plan", "asked", "slots", "error", "p90", "cosine", "time", "speed")
ALL = 16
"""A report with at most this many rows shows all of them."""


def as_text(rows: Sequence[Row], skipped: Sequence[Skipped]) -> str:
    """The chosen rows as aligned text, one line each."""
    table = [HEAD, *map(_cells, _chosen(rows))]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = ["  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in table]
    return "\n".join([*lines, *_rest(rows, skipped)])


def as_html(rows: Sequence[Row], skipped: Sequence[Skipped]) -> str:
    """The same rows as a table for notebooks."""
    head = "".join(f"<th>{escape(name)}</th>" for name in HEAD)
    body = "".join(
        f'<tr><th style="text-align:left">{escape(cells[0])}</th>'
        + "".join(f"<td>{escape(cell)}</td>" for cell in cells[1:])
        + "</tr>"
        for cells in map(_cells, _chosen(rows))
    )
    rest = "".join(f"<p>{escape(line)}</p>" for line in _rest(rows, skipped))
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>{rest}"


def _chosen(rows: Sequence[Row]) -> Sequence[Row]:
    """All rows if there are at most `ALL`; else exact attention, the oracles, and the methods that no other beats."""
    if len(rows) <= ALL:
        return rows
    best = front(rows)
    return [row for row in rows if row.kind != "method" or row in best]


def _cells(row: Row) -> tuple[str, ...]:
    return (
        row.name,
        "" if row.budget is None else str(row.budget),
        f"{row.slots:.1f}",
        f"{row.error:.3f}",
        f"{row.error_p90:.3f}",
        "" if row.cosine is None else f"{row.cosine:.4f}",
        in_words(row.ms),
        f"{row.exact_ms / row.ms:.2f}",
    )


def _rest(rows: Sequence[Row], skipped: Sequence[Skipped]) -> list[str]:
    left = len(rows) - len(_chosen(rows))
    notes = [f"and {left} rows that another one beats: fewkeys.report.print_table(report)"] if left else []
    return notes + [f"left out: {item.name}: {item.reason}" for item in skipped]
