"""Tables as lines of text."""

from collections.abc import Mapping, Sequence


def aligned(
    rows: Sequence[Mapping[str, str]],
    *,
    width: int | None = None,
    drop: Sequence[str] = (),
    headings: Mapping[int, str] | None = None,
) -> tuple[list[str], list[str]]:
    """The lines of a table with a column for each key of the rows, and the names of the columns that are shown.

    A table wider than `width` loses the columns `drop` in turn; then the first is cut. headings: lines above rows.
    """
    if not rows:
        return [], []
    sizes = {name: max(len(name), *(len(row[name]) for row in rows)) for name in rows[0]}
    first, *_ = sizes
    if width is not None:
        for name in drop:
            if sum(sizes.values()) + 2 * len(sizes) - 2 <= width:
                break
            sizes.pop(name, None)
        others = sum(sizes.values()) - sizes[first] + 2 * len(sizes) - 2
        sizes[first] = min(sizes[first], max(8, width - others))

    def line(cells: Mapping[str, str]) -> str:
        size = sizes[first]
        start = cells[first] if len(cells[first]) <= size else f"{cells[first][: size - 1]}…"
        return "  ".join([start.ljust(size), *(cells[name].rjust(sizes[name]) for name in sizes if name != first)])

    lines = [line({name: name for name in sizes}), "─" * (sum(sizes.values()) + 2 * len(sizes) - 2)]
    for number, row in enumerate(rows):
        lines += [headings[number]] if headings and number in headings else []
        lines.append(line(row).rstrip())
    return lines, list(sizes)
