"""The picture of a tuned plan: where the slots went, and what that did to each layer."""

from __future__ import annotations

import os
from typing import Any

from fewkeys.judge.result import Report
from fewkeys.model_plan import ModelPlan
from fewkeys.plan import Plan

KINDS = ("window", "other kept keys", "cluster means", "first-order term")
COLOURS = ("#4477AA", "#EE6677", "#CCBB44", "#228833")


def save_tuned(plan: ModelPlan, report: Report, path: str | os.PathLike[str]) -> None:
    """Write the picture as PNG. Needs matplotlib (`pip install fewkeys[report]`)."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.6), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2, width_ratios=(2, 1))
    _draw_slots(left, plan)
    _draw_errors(right, report)
    figure.savefig(path, format="png", dpi=150)


def _draw_slots(axes: Any, plan: ModelPlan) -> None:
    """One stacked bar per head, layer after layer, the heads of a layer from many slots to few."""
    bars = [sorted((_parts(head) for head in heads), key=sum, reverse=True) for heads in plan]
    gap, place = 1.5, 0.0
    middles = []
    for heads in bars:
        at = [place + number for number in range(len(heads))]
        below = [0.0] * len(heads)
        for number, colour in enumerate(COLOURS):
            sizes = [parts[number] for parts in heads]
            axes.bar(at, sizes, 0.9, bottom=below, color=colour)
            below = [low + size for low, size in zip(below, sizes, strict=True)]
        middles.append((at[0] + at[-1]) / 2)
        place = at[-1] + 1 + gap
    parts = [sum(parts) for heads in bars for parts in heads]
    mean = plan.record.get("slots", sum(parts) / len(parts))
    axes.axhline(mean, color="black", linewidth=0.8, linestyle=":")
    axes.set_xticks(middles, [f"layer {number}" for number in range(len(bars))])
    axes.tick_params(axis="x", length=0)
    axes.set_ylabel("slots per query")
    axes.set_title(f"Slots of each head (mean {mean:.0f})", loc="left")
    handles = [axes.bar([0], [0], color=colour) for colour in COLOURS]
    axes.legend(handles, KINDS, frameon=False, ncols=2)
    axes.spines[["top", "right"]].set_visible(False)


def _parts(plan: Plan) -> tuple[float, float, float, float]:
    """The slots of a plan by kind: window, other kept keys, means, rank. A plan that keeps every key shows none."""
    window = sum(part.remembered.latest for part in plan.parts if part.remembered)
    others = sum(getattr(part, "count", None) or 0 for part in plan.parts)
    return float(window), float(others), float(plan.rest.clusters), float(getattr(plan.rest, "rank", 0))


def _draw_errors(axes: Any, report: Report) -> None:
    """The error of every layer for each row that is not exact and not hopeless."""
    rows = [row for row in report.rows if row.kind != "exact"]
    best = min(row.error for row in rows)
    for row in sorted(rows, key=lambda row: -row.error):
        if row.error > 8 * best:
            continue
        style = {"oracle": "--", "method": "-"}[row.kind]
        width = 2.5 if row.name == "tuned" else 1.2
        axes.plot(row.per_layer["error"], style, linewidth=width, marker="o", markersize=3, label=row.name)
    axes.set_xlabel("layer")
    axes.set_xticks(range(report.layers))
    axes.set_yscale("log")
    axes.set_title("Error on held-out text", loc="left")
    axes.legend(frameon=False, fontsize="small", ncols=2, loc="upper center", bbox_to_anchor=(0.5, -0.15))
    axes.spines[["top", "right"]].set_visible(False)
