"""One figure: output error and error of the model against keys per query, for both models and every kernel."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from experiments.value_aware.table import TASKS

from fewkeys.report.style import Look, draw, logarithmic, name_lines, save, say, sheet

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Black and blue: the oracles. Green: ours. Orange: published methods. Grey: controls.
LOOKS = {
    "oblivious": Look("#000000", (0, (5, 2)), 1.8, "D"),
    "aware": Look("#0072b2", "-", 2.0, "o"),
    "fewkeys": Look("#009e73", "-", 3.4, "o"),
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
    """Write the figure as PNG and PDF. Needs matplotlib."""
    facts = results["facts"]
    kernels = list(dict.fromkeys(fact["kernel"] for fact in facts))
    models = list(dict.fromkeys(fact["model"] for fact in facts))
    figure, panels = sheet(
        "What few keys cost, by the kernel of attention",
        "oblivious, aware: oracles that choose by weights alone, and by weights and values; dotted: exact attention",
        columns=len(kernels), rows=2 * len(models), size=(3.5, 2.3), names=1.5,
    )  # fmt: skip
    for fact in facts:
        place = 2 * models.index(fact["model"]) * len(kernels) + kernels.index(fact["kernel"])
        rows = [row for row in results["rows"] if (row["model"], row["kernel"]) == (fact["model"], fact["kernel"])]
        top, bottom = panels[place], panels[place + len(kernels)]
        every = [row for row in results["rows"] if row["model"] == fact["model"] and row["method"] in LOOKS]
        errors = [max(row["output_error"], NOTHING) for row in every]
        logarithmic(top, "y", errors, [10.0**power for power in range(-3, 2)])
        exact = [own["exact"]["error"] for own in facts if own["model"] == fact["model"]]
        wrong = [*exact, *(row["model_error"] for row in every)]
        bottom.set_ylim(min(wrong) - 1.0, max(wrong) + 1.0)
        _lines(top, rows, "output_error", NOTHING)
        _lines(bottom, rows, "model_error", 0.0)
        bottom.axhline(fact["exact"]["error"], color="#000000", linewidth=0.9, linestyle=(0, (1, 2)))
        name = f"{fact['model']}, {fact['kernel']}"
        say(top, "keys (or slots) per query", "output error", f"{name} (8 keys hold {fact['skew']['top-8 mass']:.0%})")
        say(bottom, "keys (or slots) per query", f"{TASKS[fact['model']]}, %", name)
    save(figure, path)


def _lines(axes: Axes, rows: Sequence[Mapping[str, Any]], quantity: str, floor: float) -> None:
    """One line a method."""
    sizes = sorted({row["r"] for row in rows})
    logarithmic(axes, "x", sizes, [r for r in sizes if r & (r - 1) == 0])
    ends = {}
    for method, look in LOOKS.items():
        found = sorted((row["r"], max(row[quantity], floor)) for row in rows if row["method"] == method)
        if found:
            draw(axes, *zip(*found, strict=True), look)
            ends[method] = found[-1]
    name_lines(axes, ends, LOOKS)
