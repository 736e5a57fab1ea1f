"""Where the figures come from, and how a table is written."""

import json
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


@cache
def read(name: str) -> Any:
    """The JSON of a run, by its path from the root of the project. Not to be changed."""
    return json.loads((ROOT / name).read_text(encoding="utf-8"))


def table(titles: Sequence[object], rows: Iterable[Sequence[object]]) -> str:
    """Markdown."""
    lines = [[str(cell).replace("|", "\\|") for cell in line] for line in (titles, *rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in (lines[0], ["---"] * len(titles), *lines[1:]))


def fence(text: str) -> str:
    """A block of plain text."""
    return f"```text\n{text.rstrip()}\n```"


def ratio(value: float) -> str:
    """A ratio of times, with two digits after the point below 2, one below 40, none above."""
    return f"{value:.2f}" if value < 2 else f"{value:.1f}" if value < 40 else f"{value:.0f}"
