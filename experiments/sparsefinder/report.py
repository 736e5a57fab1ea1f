"""The results as tables and one picture: recall and the score of the task against sparsity, all methods."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from experiments.sparsefinder.score import Point, front, sparsest

from fewkeys.core.files import write_whole
from fewkeys.report.style import Look, draw, save, say, sheet

if TYPE_CHECKING:
    from matplotlib.axes import Axes

RECALLS = (0.8, 0.85, 0.9, 0.95, 0.98)
PAPER = ("buckets", "uniform buckets", "clusters", "clusters, top 2", "clusters, 2 rounds")
"""Sparsefinder's groupings that save work; `distance` scores every pair. Each also as ", raw"."""
# Blue and green: Sparsefinder. Orange and red: published methods. Black: what scores every pair. Grey: a control.
LOOKS = {
    "cluster pairs": Look("#009e73", "-", 3.4, "o"),
    "clusters": Look("#0072b2", "-", 1.6, "s"),
    "clusters, top 2": Look("#56b4e9", "-", 1.6, "^"),
    "distance": Look("#000000", (0, (5, 2)), 1.6, "D"),
    "window": Look("#d55e00", "-", 1.6, "s"),
    "BigBird": Look("#e69f00", "-", 1.6, "v"),
    "Routing": Look("#cc79a7", "-", 1.6, "h"),
    "random edges": Look("#767676", "-", 1.3, "x"),
}
OTHER = (
    *("buckets", "uniform buckets", "cluster pairs, raw", "clusters, raw", "block clusters v1", "block clusters v2"),
    *(
        "low-dimensional entmax",
        "Longformer",
        "BigBird, blocks",
        "Reformer",
        "strided",
        "fixed",
        "sorted LSH",
        "key norm",
    ),
)
SHOWN, ORDER, PALE = tuple(LOOKS), (*OTHER, *LOOKS), "others, by name in the tables"
"""What the picture names, and what it shows at all; results.json and the tables have every family."""
COLUMNS = 3


def write(results: Mapping[str, Any], out: Path) -> None:
    """table.md and figure.png beside results.json."""
    write_whole(out / "table.md", table(results))
    save_figure(results, out / "figure.png")


def table(results: Mapping[str, Any]) -> str:
    """Markdown: for every part, the greatest sparsity at a recall, by family and for the best of each kind."""
    blocks = []
    for part, rows in results["points"].items():
        points = [Point(**row) for row in rows]
        lines = [
            f"**{part}**: sparsity at a recall of at least",
            "",
            "| method | " + " | ".join(f"{recall:g}" for recall in RECALLS) + " | at 0.9: value, window |",
            "|---|" + "---|" * (len(RECALLS) + 1),
        ]
        groups = _groups(points)
        lines += [_line(f"**{name}**", group) for name, group in groups.items()]
        lines += [_line(name, [p for p in points if p.family == name]) for name in dict.fromkeys(_names(points))]
        blocks.append("\n".join(lines))
    task = results["task"]
    blocks.append(_task_table(task))
    return "\n\n".join(blocks) + "\n"


def _names(points: Sequence[Point]) -> list[str]:
    return [point.family for point in points]


def _groups(points: Sequence[Point]) -> dict[str, list[Point]]:
    """The rivals: Sparsefinder as published, with cluster pairs, and what needs no learning."""
    published = {name + space for name in PAPER for space in ("", ", raw")}
    return {
        "best of Sparsefinder, cluster pairs among them": [
            p for p in points if p.family in published or p.family.startswith("cluster pairs")
        ],
        "best of Sparsefinder as published": [p for p in points if p.family in published],
        "best that needs no learning": [p for p in points if p.kind == "not learned"],
        "best of the controls": [p for p in points if p.kind == "control"],
    }


def _line(name: str, points: Sequence[Point]) -> str:
    found = [sparsest(list(points), recall) for recall in RECALLS]
    at = found[RECALLS.index(0.9)]
    value = "" if at is None else f"{at.family} {at.value}, {at.window}" if "**" in name else f"{at.value}, {at.window}"
    cells = ["" if point is None else f"{point.sparsity:.3f}" for point in found]
    return f"| {name} | {' | '.join(cells)} | {value} |"


def _task_table(task: Mapping[str, Any]) -> str:
    """For every side, the greatest sparsity at a score near that of full attention."""
    name, full = task["measure"], task["exact"]
    lost = task["losses"]
    lines = [
        f"**{name}**, full entmax attention: {full:.2f}; greatest sparsity that loses at most",
        "",
        "| replaced, method | " + " | ".join(f"{loss:g}" for loss in lost) + " | best at the least loss |",
        "|---|" + "---|" * (len(lost) + 1),
    ]
    for side in dict.fromkeys(row["replaced"] for row in task["rows"]):
        mine = [row for row in task["rows"] if row["replaced"] == side]
        for family in dict.fromkeys(row["family"] for row in mine):
            rows = [row for row in mine if row["family"] == family]
            best = [
                max((row for row in rows if row["score"] >= full - loss), key=lambda row: row["sparsity"], default=None)
                for loss in lost
            ]
            cells = ["" if row is None else f"{row['sparsity']:.3f}" for row in best]
            note = next((f"{row['score']:.2f} at {row['value']}, {row['window']}" for row in best if row), "")
            lines.append(f"| {side}, {family} | {' | '.join(cells)} | {note} |")
    return "\n".join(lines)


def save_figure(results: Mapping[str, Any], path: Path) -> None:
    """Recall against sparsity for every part, then the score for what is replaced; pale lines are in the tables."""
    parts, task = results["points"], results["task"]
    sides = list(dict.fromkeys(row["replaced"] for row in task["rows"]))
    rows = -(-(len(parts) + len(sides) + 1) // COLUMNS)
    figure, panels = sheet(
        "How many pairs may go, and what is lost", "recall of gold edges, then the score of the model with attention "
        "replaced; the upper right is better", columns=COLUMNS, rows=rows, size=(4.3, 3.5), names=0.15,
    )  # fmt: skip
    for own, (part, points_of) in zip(panels, parts.items(), strict=False):
        points = [Point(**row) for row in points_of]
        for name in ORDER:
            kept = front([point for point in points if point.family == name])
            _draw(own, name, [p.sparsity for p in kept], [p.recall for p in kept])
        _limits(own, f"{part}: recall", "share of gold edges found", (0.5, 1.005))
    exact = task["exact"]
    worst = [row["score"] for row in task["rows"] if row["sparsity"] <= 0.8]
    low = min([*worst, exact]) if worst else 0.0
    for own, side in zip(panels[len(parts) :], sides, strict=False):
        for name in ORDER:
            kept = _upper([row for row in task["rows"] if row["family"] == name and row["replaced"] == side])
            _draw(own, name, [row["sparsity"] for row in kept], [row["score"] for row in kept])
        own.axhline(exact, color="#000000", linewidth=1.0, linestyle=(0, (5, 2)))
        _limits(own, f"{side} replaced", task["measure"], (max(low, 0.6 * exact), max(exact * 1.02, 0.01)))
    rest = panels[len(parts) + len(sides) :]
    for own in rest:
        own.set_axis_off()
    drawn = [line for own in panels for line in own.get_lines()]
    handles = {str(line.get_label()): line for line in drawn if not str(line.get_label()).startswith("_")}
    order = [name for name in (*SHOWN, PALE) if name in handles]
    rest[0].legend([handles[name] for name in order], order, loc="upper left", frameon=False, fontsize=10)
    save(figure, path)


def _upper(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Those that no other beats in both sparsity and score."""
    kept: list[dict[str, Any]] = []
    for row in sorted(rows, key=lambda row: (-row["sparsity"], -row["score"])):
        if not kept or row["score"] > kept[-1]["score"]:
            kept.append(row)
    return kept


def _draw(axes: Axes, name: str, x: Sequence[float], y: Sequence[float]) -> None:
    if not x:
        return
    if name in SHOWN:
        draw(axes, x, y, LOOKS[name], label=name, markevery=max(1, len(x) // 8))
    else:
        axes.plot(x, y, color="#d3d3d3", linewidth=0.9, zorder=1, label=PALE)


def _limits(axes: Axes, title: str, what: str, limits: tuple[float, float]) -> None:
    say(axes, "sparsity: share of visible pairs not attended", what, title)
    axes.set_xlim(0, 1)
    axes.set_ylim(*limits)
