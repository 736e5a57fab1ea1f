"""The common style of all figures."""

from __future__ import annotations

import io
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fewkeys.core.files import write_whole

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

OTHERS = ["#6a3d9a", "#b15928", "#1b7837", "#c51b7d", "#4d4d4d", "#2c7fb8"]
"""Colours for other lines, in turn."""


@dataclass(frozen=True)
class Look:
    """The style of one line."""

    color: str
    dash: Any = "-"
    width: float = 1.6
    marker: str = "o"

    def options(self) -> dict[str, Any]:
        line = {"color": self.color, "linestyle": self.dash, "linewidth": self.width}
        return line | {"marker": self.marker, "markersize": 7 if self.width > 3 else 4.5}


def sheet(
    title: str,
    subtitle: str = "",
    *,
    columns: int = 1,
    rows: int = 1,
    size: tuple[float, float] = (6.3, 4.65),
    names: float = 2.5,
) -> tuple[Figure, list[Axes]]:
    """A figure with a heading and rows x columns panels of about `size` inches, each with `names` inches for a legend.

    Without global state of matplotlib: it needs no display.
    """
    from matplotlib.figure import Figure

    inches = (columns * (size[0] + names), rows * (size[1] + 0.5) + 0.6)
    figure = Figure(figsize=inches, dpi=150, facecolor="white", layout="constrained")
    figure.suptitle(f"{title}\n{subtitle}".strip(), x=0.01, ha="left", fontsize=10, parse_math=False)
    panels = list(figure.subplots(rows, columns, squeeze=False).flatten())
    for axes in panels:
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", color="#e4e4e4")
        axes.set_axisbelow(True)
    return figure, panels


def say(axes: Axes, x: str, y: str, title: str = "") -> None:
    """Label the axes and the panel."""
    axes.set(xlabel=x, ylabel=y)
    axes.set_title(title, loc="left", fontsize=10.5, parse_math=False)


def draw(axes: Axes, x: Sequence[float], y: Sequence[float], look: Look, **more: Any) -> None:
    """One line with its markers; broad lines lie on top."""
    axes.plot(x, y, **look.options(), zorder=2 + look.width / 2, **more)


def upright(axes: Axes, x: float, words: str, color: str, *, strong: bool = False, top: float = 0.98) -> None:
    """A dashed vertical line with a label on its left, down from the share `top` of the height."""
    axes.axvline(x, color=color, linewidth=1.4 if strong else 0.9, linestyle="--", zorder=1)
    place = {"xycoords": ("data", "axes fraction"), "ha": "right", "va": "top"}
    label(axes, words, (x, top), (-3, 0), **place, rotation=90, fontsize=8.5, color=color)


def label(axes: Axes, words: str, at: tuple[float, float], offset: tuple[float, float], **more: Any) -> None:
    """Words at an offset (in points) from a place, with a white outline."""
    from matplotlib.patheffects import withStroke

    outline = [withStroke(linewidth=3, foreground="white")]
    axes.annotate(words, at, xytext=offset, textcoords="offset points", zorder=5, path_effects=outline, **more)


def logarithmic(axes: Axes, name: str, values: Sequence[float], marks: Sequence[float] | None = None) -> None:
    """Make an axis ("x" or "y") logarithmic, with numbers at `marks`, or at 1, 2, 5, 10, ..."""
    low, high = min(values) / 1.12, max(values) * 1.12
    steps = [m * 10.0**e for e in range(-6, 8) for m in (1, 2, 5)] if marks is None else marks
    shown = [step for step in steps if low <= step <= high]
    axes.set(**{f"{name}scale": "log", f"{name}lim": (low, high)})
    axis = axes.xaxis if name == "x" else axes.yaxis
    axis.set_ticks(shown, [f"{step:,.10g}" for step in shown])
    axis.set_ticks([], minor=True)


def name_lines(axes: Axes, ends: Mapping[str, tuple[float, float]], looks: Mapping[str, Look]) -> None:
    """A legend on the right, in the order of the lines' ends."""
    from matplotlib.lines import Line2D

    names = sorted(ends, key=lambda name: -ends[name][1])
    handles = [Line2D([], [], **looks[name].options()) for name in names]
    legend = axes.legend(handles, names, loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False, fontsize=9)
    for text in legend.get_texts():
        text.set_parse_math(False)


def save(figure: Figure, path: str | os.PathLike[str]) -> None:
    """Write the figure as PNG and as PDF: the same bytes for the same figure."""
    for suffix, date in (("png", "Software"), ("pdf", "CreationDate")):
        drawn = io.BytesIO()
        figure.savefig(drawn, format=suffix, metadata={date: None})
        write_whole(Path(path).with_suffix(f".{suffix}"), drawn.getvalue())


def svg(figure: Figure) -> str:
    """The figure as an element of an HTML page."""
    from matplotlib import rc_context

    drawn = io.StringIO()
    with rc_context({"svg.hashsalt": "fewkeys", "svg.fonttype": "none"}):
        figure.savefig(drawn, format="svg", metadata={"Date": None})
    text = drawn.getvalue()
    return text[text.index("<svg") :]
