"""The common style of all figures: panels measured in inches, plain numbers on the axes, names at the ends of lines."""

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

LEFT, BOTTOM, TOP, LINE = 0.72, 0.63, 0.72, 0.172
"""Inches beside, below and above a panel, and of a line of small text."""
OTHERS = ["#6a3d9a", "#b15928", "#1b7837", "#c51b7d", "#4d4d4d", "#2c7fb8"]
"""Colours for lines without an assigned one, in turn."""
DATES = {"png": "Software", "pdf": "CreationDate"}
"""The metadata that would make two files of the same figure differ."""


@dataclass(frozen=True)
class Look:
    """The style of one line."""

    color: str
    dash: Any = "-"
    width: float = 1.6
    marker: str = "o"


def sheet(
    title: str,
    subtitle: str = "",
    *,
    columns: int = 1,
    rows: int = 1,
    size: tuple[float, float] = (6.336, 4.65),
    names: float = 2.544,
    titled: bool = False,
) -> tuple[Figure, list[Axes]]:
    """A figure with a heading and rows x columns panels of `size` inches.

    Each panel has `names` inches on its right for the names of its lines and, if `titled`, room for a title. No global
    state of matplotlib is used, so it works without a display and beside other plots.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    top = TOP + (0.3 if titled else 0.0)
    cell, tall = LEFT + size[0] + names, top + size[1] + BOTTOM
    more = tall - 0.5  # only the first row has the heading above it
    width, height = cell * columns, tall + more * (rows - 1)
    figure = Figure(figsize=(width, height), dpi=150, facecolor="white")
    FigureCanvasAgg(figure)
    figure.text(LEFT / width, 1 - 0.33 / height, title, fontsize=14, weight="bold", va="baseline", parse_math=False)
    figure.text(
        LEFT / width, 1 - 0.57 / height, subtitle, fontsize=9.5, color="#555555", va="baseline", parse_math=False
    )
    panels = []
    for number in range(rows * columns):
        row, column = divmod(number, columns)
        low = height - top - size[1] - row * more
        place = ((LEFT + column * cell) / width, low / height, size[0] / width, size[1] / height)
        panels.append(figure.add_axes(place))
    for axes in panels:
        frame(axes)
    return figure, panels


def frame(axes: Axes) -> None:
    """Horizontal guides, no box."""
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color("#999999")
    axes.grid(axis="y", which="major", color="#e4e4e4", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(color="#999999", labelsize=9)


def say(axes: Axes, x: str, y: str, title: str = "") -> None:
    """Label the axes and the panel."""
    axes.set_xlabel(x, fontsize=10)
    axes.set_ylabel(y, fontsize=10)
    axes.set_title(title, loc="left", fontsize=10.5, parse_math=False)


def draw(axes: Axes, x: Sequence[float], y: Sequence[float], look: Look, **more: Any) -> None:
    """One line with its markers."""
    strong, thin = look.width > 3, look.marker in "x+"
    axes.plot(
        x,
        y,
        color=look.color,
        linestyle=look.dash,
        linewidth=look.width,
        marker=look.marker,
        markersize=7 if strong else 4.5,
        markeredgewidth=1.4 if thin else 0.8,
        markeredgecolor=look.color if thin else "white",
        zorder=4 if strong else 3 if look.color == "#000000" else 2,
        solid_capstyle="round",
        **more,
    )


def upright(axes: Axes, x: float, words: str, color: str, *, strong: bool = False, top: float = 0.98) -> None:
    """A dashed vertical line with a label on its left, which ends at `top` of the height."""
    width, dash = (1.4, (5, 2)) if strong else (0.9, (4, 3))
    axes.axvline(x, color=color, linewidth=width, linestyle=(0, dash), zorder=1)
    axes.annotate(
        words, (x, top), xycoords=("data", "axes fraction"), xytext=(-3, 0), textcoords="offset points", rotation=90,
        fontsize=8.5, color=color, ha="right", va="top", zorder=5, path_effects=halo(),
    )  # fmt: skip


def halo() -> list[Any]:
    """A white outline for text that is drawn over lines."""
    from matplotlib.patheffects import withStroke

    return [withStroke(linewidth=3, foreground="white")]


def logarithmic(axes: Axes, name: str, values: Sequence[float], marks: Sequence[float] | None = None) -> None:
    """A logarithmic axis ("x" or "y") around the values, with plain numbers at `marks`, or at 1, 2, 5, 10, ..."""
    low, high = min(values) / 1.12, max(values) * 1.12
    steps = [m * 10.0**e for e in range(-6, 8) for m in (1, 2, 5)] if marks is None else marks
    shown = [step for step in steps if low <= step <= high]
    axis = axes.xaxis if name == "x" else axes.yaxis
    (axes.set_xscale if name == "x" else axes.set_yscale)("log")
    (axes.set_xlim if name == "x" else axes.set_ylim)(low, high)
    axis.set_ticks(shown, [f"{step:,.10g}" for step in shown])
    axis.set_ticks([], minor=True)


def name_lines(axes: Axes, ends: Mapping[str, tuple[float, float]], looks: Mapping[str, Look]) -> None:
    """Write each line's name beside its last point. Names that would collide move apart, with thin leader lines."""
    import numpy as np

    if not ends:
        return
    axes.autoscale_view()  # matplotlib would otherwise set the limits after this
    points = axes.transAxes.inverted().transform(axes.transData.transform(np.array(list(ends.values()))))
    box = axes.get_window_extent().transformed(axes.figure.dpi_scale_trans.inverted())  # in inches
    gap, inch = LINE / box.height, 1 / box.width
    places = spread([float(y) for y in points[:, 1]], gap, 0.0, 1.0)
    for name, (x, y), place in zip(ends, points, places, strict=True):
        look = looks[name]
        axes.plot(
            [x + 0.076 * inch, 1 + 0.095 * inch, 1 + 0.285 * inch], [y, y, place], transform=axes.transAxes,
            clip_on=False, color=look.color, linewidth=0.7, alpha=0.55, zorder=1,
        )  # fmt: skip
        axes.text(
            1 + 0.33 * inch, place, name, transform=axes.transAxes, color=look.color, fontsize=9,
            va="center_baseline", weight="bold" if look.width > 3 else "normal", parse_math=False,
        )  # fmt: skip


def save(figure: Figure, path: str | os.PathLike[str]) -> None:
    """Write the figure as PNG and as PDF, whole or not at all: the same bytes for the same figure."""
    for suffix in DATES:
        write_whole(Path(path).with_suffix(f".{suffix}"), drawn(figure, suffix))


def drawn(figure: Figure, suffix: str) -> bytes:
    """The figure as the contents of a file of this kind."""
    contents = io.BytesIO()
    figure.savefig(contents, format=suffix, metadata={DATES[suffix]: None})
    return contents.getvalue()


def spread(wanted: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """The places nearest to `wanted` in least squares that keep the order and are at least `gap` apart.

    Subtracting `gap` times the rank gives isotonic regression, solved by pooling adjacent violators. Places stay in
    [low, high] as far as there is room.
    """
    order = sorted(range(len(wanted)), key=lambda i: wanted[i])
    pools: list[tuple[float, int]] = []  # mean and size
    for rank, i in enumerate(order):
        pools.append((wanted[i] - gap * rank, 1))
        while len(pools) > 1 and pools[-2][0] > pools[-1][0]:
            (a, m), (b, n) = pools[-2:]
            pools[-2:] = [((a * m + b * n) / (m + n), m + n)]
    flat = [mean for mean, size in pools for _ in range(size)]
    top = max(low, high - gap * (len(wanted) - 1))
    places = [0.0] * len(wanted)
    for rank, i in enumerate(order):
        places[i] = min(max(flat[rank], low), top) + gap * rank
    return places
