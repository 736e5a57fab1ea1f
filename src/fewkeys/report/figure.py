"""The figures of a comparison and of a tuned plan."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from fewkeys.judge.result import Report
from fewkeys.judge.standard import OURS
from fewkeys.report.style import OTHERS, Look, draw, logarithmic, name_lines, save, say, sheet
from fewkeys.report.table import lengths, title

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from fewkeys.model_plan import ModelPlan
    from fewkeys.plan import Plan

LEAST_ERROR = 1e-4
"""Smaller errors are left out of logarithmic axes."""

# Colours of Okabe and Ito, for colour-blind readers. Wine, dashed: oracles. Grey: controls.
LOOKS = {
    "exact": Look("#000000", "-", 1.8, "D"),
    "top-k per query (oracle)": Look("#882255", (0, (5, 2)), 1.8, "D"),
    "best shared columns (oracle)": Look("#b5739d", (0, (1, 1.6)), 1.6, "d"),
    "random keys": Look("#767676", "-", 1.3, "x"),
    "key norm": Look("#a3a3a3", "-", 1.3, "+"),
    "window": Look("#56b4e9", "-", 1.6, "s"),
    "sinks + window": Look("#0072b2", "-", 1.6, "s"),
    "leverage (LevAttention)": Look("#e69f00", "-", 1.6, "^"),
    "leverage (centred)": Look("#d55e00", "-", 1.6, "^"),
    "leverage + window": Look("#cc79a7", "-", 1.6, "v"),
    OURS: Look("#009e73", "-", 3.4, "o"),
    "budget": Look("#009e73", "-", 3.4, "o"),
    "tuned": Look("#d55e00", "-", 3.4, "o"),
}
"""By the names of rows, and of plans of `fewkeys bench` without their slots."""

KINDS = {"window": "#56b4e9", "other kept keys": "#0072b2", "cluster means": "#009e73", "first-order term": "#e69f00"}
"""The colours of the parts of a tuned plan."""

Points = Sequence[tuple[float, float]]


def save_figure(report: Report, path: str | os.PathLike[str]) -> None:
    """Write `error_figure` as PNG and PDF."""
    save(error_figure(report), path)


def error_figure(report: Report) -> Figure:
    """Mean output error against slots used, both logarithmic."""
    figure, (axes,) = sheet("Output error of attention with few keys", title(report))
    rows = [row for row in report.rows if row.error > LEAST_ERROR and row.slots > 0]
    lines: dict[str, list[tuple[float, float]]] = {}
    for row in sorted(rows, key=lambda row: row.slots):
        lines.setdefault(row.name, []).append((row.slots, row.error))
    say(axes, "slots per query: keys attended exactly + price of the stand-ins", "mean relative output error")
    draw_lines(axes, lines, sorted({row.budget for row in rows if row.budget is not None}))
    return figure


def time_figure(report: Report) -> Figure:
    """Milliseconds of the whole model against tokens."""
    figure, (axes,) = sheet("Time of the whole model", "one text, random weights, the plan in every layer")
    lines = {"exact": sorted((item.length, item.exact_ms) for item in report.whole_times)}
    lines |= {
        row.label: [(item.length, item.ms) for item in times] for row in report.rows if (times := report.times_of(row))
    }
    say(axes, "tokens in one text", "ms")
    draw_lines(axes, lines, lengths(report))
    return figure


def save_tuned(plan: ModelPlan, report: Report, path: str | os.PathLike[str]) -> None:
    """Draw the slots of each head and the error of each layer."""
    sizes = list(zip(*(_parts(head) for heads in plan for head in heads), strict=True))
    mean = plan.record["slots"]
    heading = f"Slots of each head, {mean:.0f} on average, and the error of each layer"
    figure, (slots, errors) = sheet(heading, report.model, columns=2, size=(7.6, 4.65), names=2.45)

    # One stacked bar per head, layer after layer.
    starts = [sum(len(heads) + 1 for heads in plan[:layer]) for layer in range(len(plan))]
    places = [start + head for start, heads in zip(starts, plan, strict=True) for head in range(len(heads))]
    below = [0.0] * len(places)
    for (kind, colour), of_kind in zip(KINDS.items(), sizes, strict=True):
        slots.bar(places, of_kind, 0.9, bottom=below, color=colour, label=kind)
        below = [low + size for low, size in zip(below, of_kind, strict=True)]
    slots.axhline(mean, color="#000000", linewidth=0.8, linestyle=":")
    slots.set_xticks(starts, [f"layer {layer}" for layer in range(len(plan))], rotation=90, fontsize=8)
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


def _parts(plan: Plan) -> tuple[float, ...]:
    """The slots of a plan by kind, as in `KINDS`; none for exact attention."""
    window = sum(part.remembered.latest for part in plan.parts if part.remembered)
    others = sum(getattr(part, "count", None) or 0 for part in plan.parts)
    return window, others, plan.rest.clusters, getattr(plan.rest, "rank", 0)


def draw_lines(axes: Axes, lines: Mapping[str, Points], marks: Sequence[float] | None = None) -> dict[str, Look]:
    """Draw lines on logarithmic axes, with numbers at `marks` of x, and a legend. Returns their styles."""
    looks = looks_of(lines)
    for name, points in lines.items():
        draw(axes, [x for x, _ in points], [y for _, y in points], looks[name])
    if not lines:
        axes.text(0.5, 0.5, "every plan is exact here", transform=axes.transAxes, ha="center", color="#555555")
        return looks
    x, y = zip(*(point for points in lines.values() for point in points), strict=True)
    logarithmic(axes, "x", [*x, max(x) / 2], marks or None)  # a single point is not stretched over the whole width
    logarithmic(axes, "y", y)
    name_lines(axes, {name: points[-1] for name, points in lines.items()}, looks)
    return looks


def looks_of(names: Iterable[str]) -> dict[str, Look]:
    """The style of each line, by name."""
    return {
        name: LOOKS.get(name.partition(":")[0], Look(OTHERS[order % len(OTHERS)])) for order, name in enumerate(names)
    }
