"""A comparison as one HTML page that loads nothing from a network."""

import json
import os
import re
from dataclasses import asdict
from html import escape
from pathlib import Path
from typing import Any

from fewkeys.core.files import write_whole
from fewkeys.judge.result import Report
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
    data = json.dumps(_data(report), allow_nan=False, ensure_ascii=False, separators=(",", ":"))
    parts = {
        "title": escape(title(report)),
        "headline": escape(headline(report)),
        "about": escape(_about(report)),
        "notes": "".join(f"<li>{escape(line)}</li>" for line in [*notes(report).values(), *skipped(report)]),
        "table": _table(report),
        "pictures": "\n".join(map(svg, figures)),
        "data": data.replace("<", "\\u003c"),  # "<" could close the script element around it
    }
    page = re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match[1]], PAGE.read_text(encoding="utf-8"))
    write_whole(path, page)


def _table(report: Report) -> str:
    rows = cells(report)
    names = sorted(rows[0] if rows else ["plan"], key=lambda name: not name.startswith(FIRST))
    head = "".join(f'<th scope="col"><button type="button">{escape(name)}</button></th>' for name in names)
    lines = []
    for row, cell in zip(sorted_rows(report), rows, strict=True):
        is_best = cell["plan"].endswith(" *")
        numbers = "".join(f"<td>{escape(cell[name])}</td>" for name in names[1:])
        label = f'<th scope="row">{escape(row.label)}{" *" if is_best else ""}</th>'
        lines.append(f'<tr class="{"best" if is_best else escape(row.kind)}">{label}{numbers}</tr>')
    return f'<table id="table"><thead><tr>{head}</tr></thead><tbody>{"".join(lines)}</tbody></table>'


def _about(report: Report) -> str:
    machine = report.machine
    text = ", ".join(report.settings.get("text") or [])
    return (
        f"{'Causal' if report.is_causal else 'Bidirectional'} attention, heads of {report.head_dim} dimensions"
        f"{f', text: {text}' if text else ''}. Timed on {machine['cpu']}, threads in use: {machine['threads']}; "
        + ", ".join(f"{name} {number}" for name, number in report.versions.items())
    )


def _data(report: Report) -> dict[str, Any]:
    """The data of the page's script."""
    rows, selected = sorted_rows(report), recommended(report)
    return {
        "rows": [
            {
                "label": row.label,
                "plan": row.plan,
                "worst": row.worst_head,
                "heads": [[float(f"{error or 0.0:.4g}") for error in heads] for heads in row.per_head["error"]],
                "kept": row.kept,
            }
            for row in rows
        ],
        "first": 0 if selected is None else rows.index(selected),
        "sample": None if report.sample is None or not all(row.kept for row in rows) else asdict(report.sample),
    }
