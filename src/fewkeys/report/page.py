"""A comparison as one self-contained HTML page, which loads nothing from a network."""

from __future__ import annotations

import gzip
import json
import os
import re
import tempfile
from base64 import b64encode
from html import escape
from pathlib import Path
from typing import Any

from fewkeys.core.files import write_whole
from fewkeys.judge.result import Report
from fewkeys.judge.sample import UNIT, Sample
from fewkeys.report.figure import look_of
from fewkeys.report.headline import crossing, headline, recommended, times_of
from fewkeys.report.style import Look
from fewkeys.report.table import advice, lengths, notes, skipped, starred, title, whole_ms

ASSETS = Path(__file__).parent / "assets"
SCRIPTS = ("state.js", "rows.js", "heads.js", "tokens.js")
"""Scripts in the order in which the page loads them; `charts.js` follows plotly."""
SYMBOLS = {
    "D": "diamond",
    "d": "diamond-tall",
    "x": "x-thin-open",
    "+": "cross-thin-open",
    "s": "square",
    "^": "triangle-up",
    "v": "triangle-down",
    "h": "hexagon",
    "o": "circle",
}
"""Plotly's symbol for each marker of matplotlib."""


def save_page(report: Report, path: str | os.PathLike[str], sample: Sample | None = None) -> None:
    """Write the page. Needs plotly (`pip install fewkeys[report]`), whose script becomes part of the page.

    `sample`: from `fewkeys.judge.sample.take` for the rows of this report; without it no tokens are shown.
    Raises `ValueError` for a sample of another report.
    """
    from plotly.offline import get_plotlyjs

    if sample is not None:
        _check(report, sample)
    parts = {
        "title": escape(title(report)),
        "headline": escape(headline(report)),
        "about": escape(_about(report)),
        "advice": "".join(f"<li>{escape(line)}</li>" for line in advice(report)),
        "notes": "".join(f"<li>{escape(line)}</li>" for line in (*notes(report).values(), *skipped(report))),
        "style": _asset("page.css"),
        "data": _json(_data(report, sample)),
        "sample": "" if sample is None else _packed(sample),
        "script": "\n".join(_asset(name) for name in SCRIPTS),
        "plotly": get_plotlyjs(),
        "charts": _asset("charts.js"),
    }
    page = re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match[1]], _asset("page.html"))
    write_whole(path, page)


def _check(report: Report, sample: Sample) -> None:
    """Raise `ValueError` for a sample of another report."""
    of = tuple(sample.tensors["exact"].shape[:2])
    if of != (report.layers, report.query_heads):
        raise ValueError(
            f"sample: expected one of {report.layers} layers of {report.query_heads} heads, got {of}; take it from the "
            "same capture"
        )
    rows = sum(name.endswith(".kept") for name in sample.tensors)
    if rows != len(report.rows):
        raise ValueError(f"sample: expected {len(report.rows)} rows, got {rows}; take it for the rows of the report")


def _asset(name: str) -> str:
    return (ASSETS / name).read_text(encoding="utf-8")


def _json(data: Any) -> str:
    """JSON without "<", which could close the script element around it."""
    return json.dumps(data, allow_nan=False, ensure_ascii=False, separators=(",", ":")).replace("<", "\\u003c")


def _about(report: Report) -> str:
    machine = report.machine
    text = ", ".join(report.settings.get("text") or [])
    return (
        f"{'Causal' if report.is_causal else 'Bidirectional'} attention, heads of {report.head_dim} dimensions"
        f"{f', text: {text}' if text else ''}. Timed on {machine['cpu']}, threads in use: {machine['threads']}; "
        + ", ".join(f"{name} {number}" for name, number in report.versions.items())
    )


def _data(report: Report, sample: Sample | None) -> dict[str, Any]:
    names = list(dict.fromkeys(row.name for row in report.rows))
    looks = {name: Look("#000000") if name == "exact" else look_of(name, i) for i, name in enumerate(names)}
    rows = [
        {
            **{name: getattr(row, name) for name in ("name", "budget", "kind", "plan", "cosine", "recall")},
            **{name: _short(getattr(row, name)) for name in ("slots", "error", "mass", "ms", "exact_ms")},
            "p50": _short(row.error_p50),
            "p90": _short(row.error_p90),
            "worst": row.worst_head,
            "worst_error": _short(row.worst_head_error),
            "heads": [[_short(error) for error in heads] for heads in row.per_head["error"]],
            "star": starred(report, row),
            "whole": {length: _short(ms) for length, ms in whole_ms(report, row).items()},
        }
        for row in report.rows
    ]
    return {
        "rows": rows,
        "looks": {
            name: {"color": look.color, "symbol": SYMBOLS[look.marker], "width": look.width, "dash": _dash(look)}
            for name, look in looks.items()
        },
        "lengths": lengths(report),
        "crossing": _crossing(report),
        "layers": report.layers,
        "heads": report.query_heads,
        "sample": None if sample is None else {"tokens": sample.tokens, "queries": sample.queries, "unit": UNIT},
    }


def _dash(look: Look) -> str:
    """Plotly's name of a line's dashes."""
    return "solid" if look.dash == "-" else "dash" if look.dash[1][0] > 2 else "dot"


def _crossing(report: Report) -> dict[str, Any] | None:
    """From which length the row of the headline is faster than exact attention."""
    row = recommended(report)
    if row is None or not report.whole_times:
        return None
    where = crossing([(item.length, item.exact_ms / item.ms) for item in times_of(report, row)])
    return None if where is None else {"length": float(f"{where:.2g}"), "row": report.rows.index(row)}


def _short(number: float | None) -> float | None:
    return None if number is None else float(f"{number:.4g}")


def _packed(sample: Sample) -> str:
    """The safetensors file of the sample, compressed, in base64."""
    with tempfile.TemporaryDirectory() as folder:
        sample.save(Path(folder) / "sample")
        data = (Path(folder) / "sample").read_bytes()
    return b64encode(gzip.compress(data, 9, mtime=0)).decode()
