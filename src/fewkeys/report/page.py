"""A comparison as one HTML page, without scripts, that loads nothing from a network."""

import math
import os
import re
from html import escape
from pathlib import Path

from fewkeys.core.files import write_whole
from fewkeys.judge.result import Report, Row
from fewkeys.report.figure import error_figure, time_figure
from fewkeys.report.headline import headline, recommended
from fewkeys.report.style import svg
from fewkeys.report.table import cells, notes, skipped, sorted_rows, title

PAGE = Path(__file__).with_name("page.html")
FIRST = ("plan", "error", "ms")
"""Beginnings of the names of the first columns, which a narrow screen shows."""


def save_page(report: Report, path: str | os.PathLike[str]) -> None:
    """Write the page."""
    figures = [error_figure(report), *([time_figure(report)] if report.whole_times else [])]
    selected = recommended(report)
    parts = {
        "title": escape(title(report)),
        "headline": escape(headline(report)),
        "about": escape(_about(report)),
        "notes": "".join(f"<li>{escape(line)}</li>" for line in [*notes(report).values(), *skipped(report)]),
        "table": _table(report),
        "pictures": "\n".join(map(svg, figures)),
        "heads": "\n".join(_heads(row, row is selected) for row in sorted_rows(report)),
    }
    page = re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match[1]], PAGE.read_text(encoding="utf-8"))
    write_whole(path, page)


def _table(report: Report) -> str:
    rows = cells(report)
    names = sorted(rows[0] if rows else ["plan"], key=lambda name: not name.startswith(FIRST))
    head = "".join(f'<th scope="col">{escape(name)}</th>' for name in names)
    lines = []
    for row, cell in zip(sorted_rows(report), rows, strict=True):
        is_best = cell["plan"].endswith(" *")
        numbers = "".join(f"<td>{escape(cell[name])}</td>" for name in names[1:])
        label = f'<th scope="row">{escape(row.label)}{" *" if is_best else ""}</th>'
        lines.append(f'<tr class="{"best" if is_best else escape(row.kind)}">{label}{numbers}</tr>')
    return f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(lines)}</tbody></table>"


def _heads(row: Row, is_open: bool) -> str:
    """A table of the errors of a plan, the larger the redder, which a click opens."""
    errors = [[error or 0.0 for error in heads] for heads in row.per_head["error"]]
    most = max(1e-9, *(error for heads in errors for error in heads))
    lines = []
    for layer, heads in enumerate(errors):
        shades = [(error, 70 * math.sqrt(error / most)) for error in heads]
        numbers = "".join(f'<td style="background:rgb(179 38 30/{red:.0f}%)">{error:.2f}' for error, red in shades)
        lines.append(f'<tr><th scope="row">layer {layer}{numbers}')
    summary = f"<summary>{escape(row.label)}: {escape(row.plan)}</summary>"
    return f'<details{" open" * is_open}>{summary}<div class="scroll"><table>{"".join(lines)}</table></div></details>'


def _about(report: Report) -> str:
    machine = report.machine
    text = ", ".join(report.settings.get("text") or [])
    return (
        f"{'Causal' if report.is_causal else 'Bidirectional'} attention, heads of {report.head_dim} dimensions"
        f"{f', text: {text}' if text else ''}. Timed on {machine['cpu']}, threads in use: {machine['threads']}; "
        + ", ".join(f"{name} {number}" for name, number in report.versions.items())
    )
