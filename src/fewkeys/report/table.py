"""Tables for the terminal."""

import shutil
import textwrap
from collections.abc import Mapping, Sequence

from fewkeys.core.columns import aligned
from fewkeys.judge.result import Report, Row
from fewkeys.report.headline import headline

DROP = ("recall", "p50", "worst head", "p90", "mass", "ms", "slots")
"""Columns that narrow terminals leave out, in this order."""
WIDE = 116
"""Characters in a line without a terminal."""
AT = "ms at {:,}"
TIMED = (
    "ms at a length: one text through a whole model of this shape, random weights, the plan in every layer. A dash: "
    "not timed."
)


def show(
    rows: Sequence[Mapping[str, str]],
    *,
    title: str = "",
    notes: Mapping[str, str] | None = None,
    width: int | None = None,
    drop: Sequence[str] = (),
    headings: Mapping[int, str] | None = None,
) -> str:
    """A table as wide as the terminal or `width`, with the notes on the columns that it shows."""
    width = width or shutil.get_terminal_size((WIDE, 24)).columns
    lines, names = aligned(rows, width=width, drop=drop, headings=headings)
    note = " ".join(text for name, text in (notes or {}).items() if name in names)
    return "\n".join([*textwrap.wrap(title, width), *lines, *textwrap.wrap(note, width)])


def print_table(report: Report, width: int | None = None) -> None:
    """Print the table with notes, the skipped plans, and the recommendation."""
    budgets = [row.budget for row in sorted_rows(report)]
    headings = {budgets.index(budget): f"{budget} slots" for budget in set(budgets) if budget is not None}
    indented = [{**row, "plan": f"  {row['plan']}"} for row in cells(report)]
    middle = [AT.format(length) for length in lengths(report)[1:-2]]
    drop = (*middle, *DROP, *(["cosine"] if report.whole_times else []))
    print(show(indented, title=title(report), notes=notes(report), width=width, drop=drop, headings=headings))
    print("\n".join([*skipped(report), "", headline(report)]))


def sorted_rows(report: Report) -> list[Row]:
    """The rows, those of each budget together; first those without one, which have no heading."""
    budgets = [None, *dict.fromkeys(row.budget for row in report.rows)]
    return sorted(report.rows, key=lambda row: budgets.index(row.budget))


def lengths(report: Report) -> list[int]:
    """The lengths at which whole models were timed."""
    return sorted({item.length for item in report.whole_times})


def title(report: Report) -> str:
    """The model and its text in one line, without a date or a path."""
    name = report.model.rstrip("/\\").replace("\\", "/").rpartition("/")[2] or report.model
    sequences = "1 sequence" if report.sequences == 1 else f"{report.sequences} sequences"
    equal = report.tokens == report.sequences * report.length
    tokens = f" × {report.length} tokens" if equal else f", {report.tokens} tokens"
    return f"{name} · {sequences}{tokens} · {report.layers} layers × {report.query_heads} heads"


def notes(report: Report) -> dict[str, str]:
    """The meaning of each column."""
    batch, heads, length, _ = report.settings["timed_shape"]
    of_length = lengths(report)
    time = {AT.format(of_length[-1]): TIMED} if of_length else {"speed": "speed: exact attention's time / the plan's."}
    return {
        "slots": "slots: keys that a query attends to, plus the cost of stand-ins, on average.",
        "error": "error: |approximate - exact| / |exact| of a head's output, mean over queries, heads and layers.",
        "ms": f"ms: attention of {heads} heads over {batch} × {length} tokens.",
        "p50": "p50, p90: the median of these errors, and the value that 90 % of them stay below.",
        "worst head": "worst head: the largest mean error of a head; L5 H6 is head 6 of layer 5, both counted from 0.",
        "mass": "mass: exact attention weight on the kept keys.",
        "recall": f"recall: share of exact weights >= {report.settings['eps']:g} that are kept.",
        "cosine": "cosine: mean-pooled last hidden states, every layer approximated, against the exact model.",
        **time,
        "plan": "(oracle): computes every score to pick its keys; a reference, not a method. *: the method with the "
        "least error within its budget of slots.",
    }


def skipped(report: Report) -> list[str]:
    """The plans without a row, with budgets and reasons."""
    budgets: dict[tuple[str, str], list[str]] = {}
    for item in report.skipped:
        budgets.setdefault((item.name, item.reason), []).append("" if item.budget is None else str(item.budget))
    lines = []
    for (name, reason), numbers in budgets.items():
        at = f" at {', '.join(numbers)} slots" if any(numbers) else ""
        lines.append(f"left out: {name}{at}: {reason}")
    return lines


def cells(report: Report) -> list[dict[str, str]]:
    """The cells of `sorted_rows` by column. Columns without any number are left out."""
    rows = [_cells(report, row) for row in sorted_rows(report)]
    filled = {name for row in rows for name, cell in row.items() if cell != "-"}
    return [{name: cell for name, cell in row.items() if name in filled} for row in rows]


def _cells(report: Report, row: Row) -> dict[str, str]:
    layer, head = row.worst_head
    is_best = row.budget is not None and row is report.best(row.budget)
    shown = {
        "plan": f"{row.name}{' *' if is_best else ''}",
        "slots": f"{row.slots:.1f}",
        "error": f"{row.error:.3f}",
        "p50": f"{row.error_p50:.3f}",
        "p90": f"{row.error_p90:.3f}",
        "worst head": f"{row.worst_head_error:.2f} L{layer} H{head}",
        "mass": f"{row.mass:.3f}",
        "recall": "-" if row.recall is None else f"{row.recall:.3f}",
        "cosine": "-" if row.cosine is None else f"{row.cosine:.4f}",
    }
    if not report.whole_times:
        return shown | {"ms": f"{row.ms:.1f}", "speed": f"{row.exact_ms / row.ms:.2f}×"}
    times = {item.length: item.exact_ms for item in report.whole_times if row.kind == "exact"}
    times |= {item.length: item.ms for item in report.times_of(row)}
    return shown | {AT.format(n): f"{times[n]:,.0f}" if n in times else "-" for n in lengths(report)}
