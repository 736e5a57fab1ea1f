"""The results as a table and a picture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

TITLES = {"text": ("perplexity", "perplexity of text"), "recall": ("accuracy", "pairs recalled")}


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
    """Both tasks side by side, against the slots."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), layout="constrained")
    for axes, (task, (field, title)) in zip(figure.subplots(1, 2), TITLES.items(), strict=True):
        rows = results[task]
        for method in dict.fromkeys(row["method"] for row in rows):
            mine = [row for row in rows if row["method"] == method]
            if method == "exact":
                axes.axhline(mine[0][field], color="black", linewidth=1, label="exact")
                continue
            ours = method.startswith("fewkeys")
            axes.plot(
                [row["slots"] for row in mine],
                [row[field] for row in mine],
                marker="o",
                markersize=4,
                linewidth=2 if ours else 1,
                label=method,
            )
        slots = results["settings"]["slots"]
        axes.set_xscale("log", base=2)
        axes.set_xticks(slots, [str(count) for count in slots])
        if field == "perplexity":
            axes.set_yscale("log")
            axes.yaxis.set_minor_formatter("{x:.0f}")
            axes.yaxis.set_major_formatter("{x:.0f}")
        axes.set(xlabel="slots", title=title)
    axes.legend(fontsize=7)
    figure.savefig(path, dpi=150)
