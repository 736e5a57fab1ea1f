"""One figure: output error and error of the model against keys per query, for both models and every kernel."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from experiments.value_aware.table import TASKS

from fewkeys.report.style import Look

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Black and blue: the oracles. Green: ours. Orange: published methods. Grey: controls.
LOOKS = {
    "oblivious": Look("#000000", (0, (5, 2)), 1.8, "D"),
    "aware": Look("#0072b2", "-", 2.6, "o"),
    "fewkeys": Look("#009e73", "-", 2.6, "o"),
    "LevAttention": Look("#e69f00", "-", 1.4, "^"),
    "HyperAttention": Look("#d55e00", "-", 1.4, "v"),
    "window": Look("#56b4e9", "-", 1.4, "s"),
    "key norm": Look("#a3a3a3", "-", 1.2, "+"),
    "random keys": Look("#767676", "-", 1.2, "x"),
}
"""Drawn methods; the projected form of oblivious lies within the width of a line of the renormalised one."""
NOTHING = 1e-3
"""The lowest output error that is drawn: what is below lies on the floor."""


def save_figure(results: Mapping[str, Any], path: str | os.PathLike[str]) -> None:
    """Write the figure as PNG, whole or not at all. Needs matplotlib."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    facts = results["facts"]
    kernels = list(dict.fromkeys(fact["kernel"] for fact in facts))
    models = list(dict.fromkeys(fact["model"] for fact in facts))
    figure = Figure(figsize=(3.9 * len(kernels) + 0.4, 5.6 * len(models) + 1.2), dpi=130, facecolor="white")
    FigureCanvasAgg(figure)
    grid = figure.subplots(2 * len(models), len(kernels), squeeze=False, sharex=True, sharey="row")
    for fact in facts:
        first, column = 2 * models.index(fact["model"]), kernels.index(fact["kernel"])
        rows = [row for row in results["rows"] if (row["model"], row["kernel"]) == (fact["model"], fact["kernel"])]
        top, bottom = grid[first][column], grid[first + 1][column]
        _lines(top, rows, "output_error", NOTHING)
        _lines(bottom, rows, "model_error", 0.0)
        top.set_yscale("log")
        bottom.axhline(fact["exact"]["error"], color="#555555", linewidth=0.9, linestyle=(0, (1, 2)))
        mass = fact["skew"]["top-8 mass"]
        top.set_title(f"{fact['model']}, {fact['kernel']} (8 keys hold {mass:.0%})", fontsize=10)
        if column == 0:
            top.set_ylabel("mean relative output error", fontsize=9)
            bottom.set_ylabel(f"{TASKS[fact['model']]}, %", fontsize=9)
    for axes in grid[-1]:
        axes.set_xlabel("keys (or slots) per query", fontsize=9)
    handles, names = grid[0][0].get_legend_handles_labels()
    figure.legend(handles, names, loc="upper center", ncols=len(names), frameon=False, fontsize=9, handlelength=2.4)
    figure.tight_layout(rect=(0, 0, 1, 0.965))
    draft = Path(path).with_name(f".{Path(path).name}")
    figure.savefig(draft, format="png", metadata={"Software": None})
    draft.replace(path)


def _lines(axes: Axes, rows: Sequence[Mapping[str, Any]], quantity: str, floor: float) -> None:
    for method, look in LOOKS.items():
        found = sorted((row["r"], max(row[quantity], floor)) for row in rows if row["method"] == method)
        axes.plot(
            [r for r, _ in found],
            [value for _, value in found],
            color=look.color,
            linestyle=look.dash,
            linewidth=look.width,
            marker=look.marker,
            markersize=5 if look.marker in "+x" else 4,
            zorder=4 if look.width > 2 else 3,
            label=method,
        )
    axes.set_xscale("log", base=2)
    sizes = [r for r in sorted({row["r"] for row in rows}) if r & (r - 1) == 0]
    axes.set_xticks(sizes, [str(r) for r in sizes])
    axes.set_xticks([], minor=True)
    axes.grid(axis="y", color="#e4e4e4", linewidth=0.7)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    axes.tick_params(labelsize=8)
