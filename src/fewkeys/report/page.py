"""A comparison as one HTML page without scripts, which loads nothing from a network."""

from __future__ import annotations

import os
from base64 import b64encode
from collections.abc import Iterable
from html import escape

from fewkeys.core.files import write_whole
from fewkeys.judge.result import Report
from fewkeys.judge.row import Row
from fewkeys.report.figure import figure_of
from fewkeys.report.headline import headline, recommended
from fewkeys.report.style import drawn
from fewkeys.report.table import advice, cells, notes, skipped, starred, title

STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 72rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; } img { max-width: 100%; } table { border-collapse: collapse; font-size: .85rem; }
td, th { padding: .15rem .5rem; text-align: right; white-space: nowrap; } tr > th:first-child { text-align: left; }
.scroll { overflow-x: auto; } .best th { font-weight: 700; } tbody th { font-weight: 400; }
.oracle, .exact, .quiet { color: #555; }
"""


def save_page(report: Report, path: str | os.PathLike[str]) -> None:
    """Write the page: the sentence of the headline, the figure, every row, and the error of every layer and head.

    Needs matplotlib (`pip install fewkeys[report]`).
    """
    row = recommended(report)
    parts = [
        f"<h1>{escape(headline(report))}</h1>",
        f'<p class="quiet">{escape(title(report))}</p>',
        f'<img alt="Error of attention\'s output against slots per query" src="{_picture(report)}">',
        "<h2>The best at each number of slots</h2>",
        _list(advice(report)),
        "<h2>Every row</h2>",
        _table(report),
        _list((*notes(report).values(), *skipped(report))),
        "" if row is None else _heads(row),
        f'<p class="quiet">{escape(_about(report))}</p>',
    ]
    head = f'<meta charset="utf-8"><title>{escape(title(report))}</title><style>{STYLE}</style>'
    write_whole(
        path,
        f'<!doctype html>\n<html lang="en"><head>{head}</head>\n<body>\n' + "\n".join(parts) + "\n</body></html>\n",
    )


def _picture(report: Report) -> str:
    return f"data:image/png;base64,{b64encode(drawn(figure_of(report), 'png')).decode()}"


def _list(lines: Iterable[str]) -> str:
    return '<ul class="quiet">' + "".join(f"<li>{escape(line)}</li>" for line in lines) + "</ul>"


def _table(report: Report) -> str:
    rows = [(row, cells(report, row)) for row in report.rows]
    names = "".join(f"<th>{escape(name)}</th>" for name in (rows[0][1] if rows else ()))
    lines = [f"<thead><tr><th>plan</th>{names}</tr></thead><tbody>"]
    for row, values in rows:
        best = starred(report, row)
        name = row.name + ("" if row.budget is None else f" {row.budget}") + (" *" if best else "")
        kind = f"{row.kind} best" if best else row.kind
        lines.append(f'<tr class="{kind}" title="{escape(row.plan)}"><th>{escape(name)}</th>')
        lines.append("".join(f"<td>{escape(value)}</td>" for value in values.values()) + "</tr>")
    return f'<div class="scroll"><table>{"".join(lines)}</tbody></table></div>'


def _heads(row: Row) -> str:
    """The error of every layer and head under one row's plan, the darker the larger."""
    errors = [[error or 0.0 for error in heads] for heads in row.per_head["error"]]
    most = max(1e-6, *(error for heads in errors for error in heads))
    lines = ["<tr><th></th>" + "".join(f"<th>{head}</th>" for head in range(len(errors[0]))) + "</tr>"]
    for layer, heads in enumerate(errors):
        shades = [f"rgba(213,94,0,{(error / most) ** 0.5:.2f})" for error in heads]
        shown = (f'<td style="background:{shade}">{error:.2f}</td>' for shade, error in zip(shades, heads, strict=True))
        lines.append(f"<tr><th>{layer}</th>{''.join(shown)}</tr>")
    name = row.name if row.budget is None else f"{row.name}, {row.budget} slots"
    says = f"<h2>Error of every layer and head under {escape(name)}</h2><p>Layers downwards, heads across.</p>"
    return f'{says}<div class="scroll"><table>{"".join(lines)}</table></div>'


def _about(report: Report) -> str:
    machine = report.machine
    text = ", ".join(report.settings.get("text") or [])
    return (
        f"{'Causal' if report.is_causal else 'Bidirectional'} attention, heads of {report.head_dim} dimensions"
        f"{f', text: {text}' if text else ''}. Timed on {machine['cpu']}, threads in use: {machine['threads']}; "
        + ", ".join(f"{name} {number}" for name, number in report.versions.items())
    )
