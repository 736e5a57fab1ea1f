"""One picture: the loss on held-out text against the seconds spent on steps."""

from __future__ import annotations

import os
from typing import Any

from fewkeys.report.style import Look, draw, logarithmic, name_lines, save, say, sheet

LOOKS = (Look("#000000", (0, (5, 2)), 1.8, "D"), Look("#009e73", "-", 3.4, "o"))


def save_picture(data: dict[str, Any], path: str | os.PathLike[str]) -> None:
    """Draw the results as PNG. Both runs are judged with exact attention."""
    cpu = data["machine"]["cpu"]
    subtitle = f"{data['layers']} layers, {data['heads']} heads, {data['length']:,} bytes; {cpu}, one thread"
    figure, (axes,) = sheet("Training by few keys, and exactly", subtitle, names=2.0)
    looks = dict(zip(data["runs"], LOOKS, strict=True))
    for name, rows in data["runs"].items():
        draw(axes, [row["seconds"] for row in rows], [row["exact"] for row in rows], looks[name])
    say(axes, "seconds of training", "held-out loss with exact attention, nats per hidden byte")
    every = [row for rows in data["runs"].values() for row in rows]
    axes.set_xlim(0, 1.03 * max(row["seconds"] for row in every))
    logarithmic(axes, "y", [row["exact"] for row in every], [place / 5 for place in range(1, 50)])
    name_lines(axes, {name: (rows[-1]["seconds"], rows[-1]["exact"]) for name, rows in data["runs"].items()}, looks)
    save(figure, path)
