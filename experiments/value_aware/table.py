"""The table of the experiment as Markdown."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

TASKS = {"encoder": "masked-token error", "lm": "next-token error"}


def table(results: Mapping[str, Any]) -> str:
    """One table for each model and kernel: output error, and error of the model in per cent, by method and r."""
    parts = ["# Output error / error of the model in per cent, by keys per query\n"]
    for fact in results["facts"]:
        model, kernel = fact["model"], fact["kernel"]
        rows = [row for row in results["rows"] if (row["model"], row["kernel"]) == (model, kernel)]
        sizes = sorted({row["r"] for row in rows})
        exact = fact["exact"]
        parts.append(
            f"## {model}, {kernel}: {TASKS[model]} with exact attention {exact['error']:.1f} ± {exact['se']:.1f} %\n"
        )
        parts.append("| method | " + " | ".join(f"r = {r}" for r in sizes) + " |")
        parts.append("|---|" + "---|" * len(sizes))
        for method in dict.fromkeys(row["method"] for row in rows):
            cells = {row["r"]: row for row in rows if row["method"] == method}
            parts.append(f"| {method} | " + " | ".join(cell(cells[r]) for r in sizes) + " |")
        parts.append("")
    parts.append(_gains(results))
    return "\n".join(parts)


def cell(row: Mapping[str, Any]) -> str:
    return f"{_short(row['output_error'])} / {row['model_error']:.1f}"


def _short(error: float) -> str:
    if error < 5e-6:
        return "0"
    return f"{error:.0e}" if error < 1e-3 else f"{error:.3f}" if error < 0.1 else f"{error:.2f}"


def _gain(found: Mapping[str, float]) -> str:
    return f"{found['error']:+.1f} ± {found['se']:.1f}; {found['loss']:+.3f} ± {found['loss_se']:.3f}"


def _gains(results: Mapping[str, Any]) -> str:
    """How much less the model loses with the value-aware optimum than with the oblivious one, sequence by sequence."""
    rows = [row for row in results["rows"] if row["method"] == "aware"]
    pairs = list(dict.fromkeys((row["model"], row["kernel"]) for row in rows))
    sizes = sorted({row["r"] for row in rows})
    parts = ["# By how much aware-r beats oblivious-r: points of model error; nats of loss (paired, ± SE)\n"]
    parts.append("| model, kernel | " + " | ".join(f"r = {r}" for r in sizes) + " |")
    parts.append("|---|" + "---|" * len(sizes))
    for pair in pairs:
        found = {row["r"]: row["below_oblivious"] for row in rows if (row["model"], row["kernel"]) == pair}
        cells = [_gain(found[r]) if r in found else "" for r in sizes]
        parts.append(f"| {', '.join(pair)} | " + " | ".join(cells) + " |")
    return "\n".join(parts) + "\n"
