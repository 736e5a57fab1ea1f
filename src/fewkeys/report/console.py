"""Tables that fit the terminal, also when piped. Needs rich (`pip install fewkeys[report]`)."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from rich.console import Console

WIDE = 116
"""Characters in a line if there is no terminal."""


@dataclass(frozen=True)
class Column:
    """A column of a table. Without enough room, columns with `drop` above 0 are left out, the lowest first."""

    name: str
    cells: Sequence[str]
    justify: Literal["left", "right"] = "right"
    drop: int = 0

    @property
    def width(self) -> int:
        return max(map(len, (self.name, *self.cells)))


def console() -> Console:
    """Standard output as wide as the environment variable `COLUMNS` or, without it, the terminal, also when piped."""
    from rich.console import Console

    return Console(highlight=False, width=_width())


def _width() -> int:
    if (columns := os.environ.get("COLUMNS", "")).isdigit() and int(columns):
        return int(columns)
    for stream in (1, 2, 0):
        try:
            return os.get_terminal_size(stream).columns or WIDE
        except OSError:
            continue
    return WIDE


def print_columns(
    console: Console,
    columns: Sequence[Column],
    *,
    title: str = "",
    sections: Mapping[int, str] | None = None,
    styles: Sequence[str] = (),
) -> set[str]:
    """Print the columns that fit, without markup in cells, and return their names.

    `sections`: headings by the number of the row below; `styles`: one for each row.
    """
    from rich.box import SIMPLE_HEAD
    from rich.table import Table
    from rich.text import Text

    shown = list(columns)
    for column in sorted((column for column in columns if column.drop), key=lambda column: column.drop):
        if sum(column.width + 2 for column in shown) <= console.width - 1:
            break
        shown.remove(column)
    others = sum(column.width + 2 for column in shown[1:])
    table = Table(
        title=Text(title) if title else None, box=SIMPLE_HEAD, collapse_padding=True, pad_edge=False, title_style="bold"
    )
    for number, column in enumerate(shown):
        # The first column holds names and is cut to the room that is left.
        width = column.width if number else min(column.width, max(8, console.width - others - 2))
        table.add_column(column.name, justify=column.justify, no_wrap=True, width=width)
    for number, cells in enumerate(zip(*(column.cells for column in shown), strict=True)):
        if heading := (sections or {}).get(number):
            table.add_section()
            table.add_row(Text(heading), style="bold")
        table.add_row(*map(Text, cells), style=styles[number] if styles else "")
    console.print(table)
    return {column.name for column in shown}
