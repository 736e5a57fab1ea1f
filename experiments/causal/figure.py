"""The results as a table and a picture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fewkeys.report.style import Look, draw, logarithmic, name_lines, save, say, sheet

TITLES = {"text": ("perplexity", "perplexity of text"), "recall": ("accuracy", "pairs recalled")}
LOOKS = {
    "fewkeys": Look("#009e73", "-", 3.4),
    "fewkeys + sinks": Look("#009e73", (0, (3, 1.5)), 1.8, "s"),
    "sinks + window": Look("#0072b2", "-", 1.6, "s"),
    "leverage": Look("#d55e00", "-", 1.6, "^"),
    "accumulated attention": Look("#cc79a7", "-", 1.6, "v"),
    "random": Look("#767676", "-", 1.3, "x"),
    "key norm": Look("#a3a3a3", "-", 1.3, "+"),
}


def table(results: dict[str, Any]) -> str:
    """Markdown: methods by slots, for each task."""
    slots = results["settings"]["slots"]
    parts = []
    for task, (field, title) in TITLES.items():
        rows = {(row["method"], row["slots"]): row[field] for row in results[task]}
        lines = [
            f"**{title}** (exact: {rows['exact', 0]:.3f})",
            "",
            "| method | " + " | ".join(f"{count} slots" for count in slots) + " |",
            "|---|" + "---|" * len(slots),
        ]
        methods = dict.fromkeys(name for name, _ in rows if name != "exact")
        lines += [f"| {name} | " + " | ".join(f"{rows[name, n]:.3f}" for n in slots) + " |" for name in methods]
        parts.append("\n".join(lines))
    return "\n\n".join(parts) + "\n"


def save_figure(results: dict[str, Any], path: Path) -> None:
    """Both tasks side by side, against the slots; what exact attention reaches is dashed."""
    slots = results["settings"]["slots"]
    figure, panels = sheet(
        "A decoder with constant memory", "small models trained here; dashed: exact attention", columns=2,
        size=(4.6, 4.2), names=1.9,
    )  # fmt: skip
    for axes, (task, (field, title)) in zip(panels, TITLES.items(), strict=True):
        rows = results[task]
        exact = next(row[field] for row in rows if row["method"] == "exact")
        axes.axhline(exact, color="#000000", linewidth=1.2, linestyle=(0, (5, 2)))
        ends = {}
        for method in dict.fromkeys(row["method"] for row in rows if row["method"] != "exact"):
            mine = [row for row in rows if row["method"] == method]
            draw(axes, [row["slots"] for row in mine], [row[field] for row in mine], LOOKS[method])
            ends[method] = (mine[-1]["slots"], mine[-1][field])
        say(axes, "slots per query", title)
        logarithmic(axes, "x", slots, slots)
        if field == "perplexity":
            values = [row[field] for row in rows]
            logarithmic(axes, "y", values, range(40, 2 * int(max(values)), 10))
        name_lines(axes, ends, LOOKS)
    save(figure, path)
