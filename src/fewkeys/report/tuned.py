"""The figure of a tuned plan: the slots of each head, and the error of each layer."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from fewkeys.judge.result import Report
from fewkeys.model_plan import ModelPlan
from fewkeys.plan import Plan
from fewkeys.report.figure import look_of
from fewkeys.report.style import Look, draw, logarithmic, name_lines, save, say, sheet

if TYPE_CHECKING:
    from matplotlib.axes import Axes

KINDS = ("window", "other kept keys", "cluster means", "first-order term")
COLOURS = ("#56b4e9", "#0072b2", "#009e73", "#e69f00")
TUNED = Look("#d55e00", "-", 3.4)


def save_tuned(plan: ModelPlan, report: Report, path: str | os.PathLike[str]) -> None:
    """Write the figure as PNG. Needs matplotlib (`pip install fewkeys[report]`)."""
    paid = sum(sum(_parts(head)) for heads in plan for head in heads) / sum(len(heads) for heads in plan)
    mean = plan.record.get("slots", paid)
    heading = f"Slots of each head, {mean:.0f} on average, and the error of each layer"
    figure, (slots, errors) = sheet(heading, report.model, columns=2, size=(7.6, 4.65), names=2.45)
    _draw_slots(slots, plan, mean)
    _draw_errors(errors, report)
    save(figure, path)


def _draw_slots(axes: Axes, plan: ModelPlan, mean: float) -> None:
    """Draw one stacked bar per head, layer after layer, with the numbers of the heads below."""
    ticks, middles, place = [], [], 0.0
    for number, heads in enumerate(plan):
        at = [place + head for head in range(len(heads))]
        below = [0.0] * len(heads)
        for sizes, colour in zip(zip(*map(_parts, heads), strict=True), COLOURS, strict=True):
            axes.bar(at, sizes, 0.9, bottom=below, color=colour)
            below = [low + size for low, size in zip(below, sizes, strict=True)]
        ticks += [(x, str(head)) for head, x in enumerate(at)]
        middles.append(((at[0] + at[-1]) / 2, f"layer {number}"))
        place = at[-1] + 2.5
    axes.axhline(mean, color="#000000", linewidth=0.8, linestyle=":")
    small = len(ticks) > 40
    axes.set_xticks([x for x, _ in ticks], [head for _, head in ticks], fontsize=4.5 if small else 8)
    axes.tick_params(axis="x", length=0, pad=1)
    where: dict[str, Any] = {"xycoords": ("data", "axes fraction"), "annotation_clip": False}
    for x, name in middles:
        axes.annotate(name, (x, -0.055), ha="center", va="top", fontsize=9, **where)
    axes.set_xlim(-1, place - 1.5)
    say(axes, "", "slots per query")
    handles = [axes.bar([0], [0], color=colour) for colour in COLOURS]
    axes.legend(handles[::-1], KINDS[::-1], frameon=False, fontsize=9, loc="upper left", bbox_to_anchor=(1.0, 1.0))


def _parts(plan: Plan) -> tuple[float, float, float, float]:
    """The slots of a plan by kind: window, other kept keys, means, rank. A plan that keeps every key shows none."""
    window = sum(part.remembered.latest for part in plan.parts if part.remembered)
    others = sum(getattr(part, "count", None) or 0 for part in plan.parts)
    return float(window), float(others), float(plan.rest.clusters), float(getattr(plan.rest, "rank", 0))


def _draw_errors(axes: Axes, report: Report) -> None:
    """Draw the error of every layer for each row that is not exact."""
    rows = [row for row in report.rows if row.kind != "exact"]
    lines = {row.name: [error or 0.0 for error in row.per_layer["error"]] for row in rows}
    looks = {name: TUNED if name == "tuned" else look_of(name, order) for order, name in enumerate(lines)}
    layers = range(report.layers)
    for name, errors in lines.items():
        draw(axes, layers, errors, looks[name])
    say(axes, "layer", "mean relative output error on held-out text")
    axes.set_xticks(layers, [str(layer) for layer in layers])
    logarithmic(axes, "y", [error for errors in lines.values() for error in errors if error > 0] or [1.0])
    name_lines(axes, {name: (layers[-1], errors[-1]) for name, errors in lines.items()}, looks)
