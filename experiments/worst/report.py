"""The table and the picture of the results of `run.py`."""

from __future__ import annotations

import os
from typing import Any

from fewkeys.report.style import Look, draw, logarithmic, name_lines, save, say, sheet

COLORS = ("#009e73", "#0072b2", "#d55e00", "#767676")


def table(data: dict[str, Any]) -> str:
    """Markdown: for every plan the inputs, then the heads of trained models."""
    lines: list[str] = []
    for name, rows in data["inputs"].items():
        lines += [f"**`{name}`, inputs made to break it**", "", _head("input")]
        lines += [_line(row["input"], row) for row in rows] + [""]
    for name, heads in (data.get("heads") or {}).items():
        if heads is not None:
            shares = heads["quantiles"]
            lines += [
                f"**`{name}`, {heads['heads']:,} heads of trained models**: mean error {heads['mean']:.3f}, median "
                f"{shares['0.5']:.3f}, of a hundred the worst {shares['0.99']:.2f}, of a thousand "
                f"{shares['0.999']:.2f}, of all {shares['1.0']:.2f}",
                "",
                _head("head"),
            ]
            lines += [_line(row["head"], row) for row in heads["worst"]] + [""]
    return "\n".join(lines)


def _head(first: str) -> str:
    titles = f"| {first} | error | worst 1 % of queries | best keys | spot check: error, 95 % interval |"
    return f"{titles}\n| --- | --- | --- | --- | --- |"


def _line(title: str, row: dict[str, Any]) -> str:
    error, low, high = row["spot check"]
    figures = " | ".join(f"{row[name]:.3g}" for name in ("error", "worst queries", "best keys"))
    return f"| {title} | {figures} | {error:.3g}, {low:.3g} to {high:.3g} |"


def save_picture(data: dict[str, Any], path: str | os.PathLike[str]) -> None:
    """Draw the share of heads whose error is larger, against the error, a line for each plan, as PNG."""
    heads = {name: row for name, row in data["heads"].items() if row is not None}
    figure, (axes,) = sheet("Errors of single heads", "the share of heads with a larger error", names=4.2)
    ends, looks = {}, {}
    for (name, row), color in zip(heads.items(), COLORS, strict=False):
        points = [(error, 1 - float(share)) for share, error in row["quantiles"].items() if float(share) < 1]
        points.append((row["quantiles"]["1.0"], 1 / row["heads"]))
        looks[name], ends[name] = Look(color), (points[-1][0], points[-1][1])
        draw(axes, [error for error, _ in points], [share for _, share in points], looks[name])
    logarithmic(axes, "x", [row["quantiles"][share] for row in heads.values() for share in row["quantiles"]])
    logarithmic(axes, "y", [0.5, *(1 / row["heads"] for row in heads.values())])
    say(axes, "mean relative output error of a head", "share of heads beyond")
    name_lines(axes, ends, looks)
    save(figure, path)
