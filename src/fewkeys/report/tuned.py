"""The figure of a tuned plan: the slots of each head, and the error of each layer."""

from __future__ import annotations

import os

from fewkeys.judge.result import Report
from fewkeys.model_plan import ModelPlan
from fewkeys.plan import Plan
from fewkeys.report.figure import looks_of
from fewkeys.report.style import draw, logarithmic, name_lines, save, say, sheet

KINDS = {"window": "#56b4e9", "other kept keys": "#0072b2", "cluster means": "#009e73", "first-order term": "#e69f00"}


def save_tuned(plan: ModelPlan, report: Report, path: str | os.PathLike[str]) -> None:
    """Draw the figure as PNG and PDF. Needs matplotlib."""
    parts = [[_parts(head) for head in heads] for heads in plan]
    flat = [head for heads in parts for head in heads]
    mean = plan.record.get("slots", sum(map(sum, flat)) / len(flat))
    heading = f"Slots of each head, {mean:.0f} on average, and the error of each layer"
    figure, (slots, errors) = sheet(heading, report.model, columns=2, size=(7.6, 4.65), names=2.45)

    # One stacked bar per head, layer after layer.
    starts = [sum(len(heads) + 1 for heads in parts[:layer]) for layer in range(len(parts))]
    places = [start + head for start, heads in zip(starts, parts, strict=True) for head in range(len(heads))]
    below = [0.0] * len(flat)
    for (kind, colour), sizes in zip(KINDS.items(), zip(*flat, strict=True), strict=True):
        slots.bar(places, sizes, 0.9, bottom=below, color=colour, label=kind)
        below = [low + size for low, size in zip(below, sizes, strict=True)]
    slots.axhline(mean, color="#000000", linewidth=0.8, linestyle=":")
    slots.set_xticks(starts, [f"layer {layer}" for layer in range(len(parts))], rotation=90, fontsize=8)
    slots.legend(reverse=True, frameon=False, fontsize=9, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    say(slots, "heads, layer by layer", "slots per query")

    lines = {row.name: [error or 0.0 for error in row.per_layer["error"]] for row in report.rows if row.kind != "exact"}
    looks = looks_of(lines)
    for name, by_layer in lines.items():
        draw(errors, range(report.layers), by_layer, looks[name])
    say(errors, "layer", "mean relative output error on held-out text")
    errors.set_xticks(range(report.layers))
    logarithmic(errors, "y", [error for by_layer in lines.values() for error in by_layer if error > 0] or [1.0])
    name_lines(errors, {name: (0.0, by_layer[-1]) for name, by_layer in lines.items()}, looks)
    save(figure, path)


def _parts(plan: Plan) -> tuple[float, float, float, float]:
    """The slots of a plan by kind, as in `KINDS`. A plan that keeps every key shows none."""
    window = sum(part.remembered.latest for part in plan.parts if part.remembered)
    others = sum(getattr(part, "count", None) or 0 for part in plan.parts)
    return float(window), float(others), float(plan.rest.clusters), float(getattr(plan.rest, "rank", 0))
