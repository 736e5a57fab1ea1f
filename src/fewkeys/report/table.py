"""The table of a comparison, and the best plan for each budget."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fewkeys.judge.pareto import best, oracle
from fewkeys.judge.result import Report
from fewkeys.judge.row import Row
from fewkeys.report.console import Column, console, print_columns
from fewkeys.report.headline import headline, times_of

if TYPE_CHECKING:
    from rich.console import Console

DROP = {"recall": 1, "p50": 2, "worst head": 3, "p90": 4, "mass": 5, "ms": 6, "slots": 7}
"""Columns that narrow terminals leave out, in this order; the JSON has them."""
AT = "ms at {:,}"
"""The column of a whole model's time at a length."""


def print_table(report: Report, screen: Console | None = None) -> None:
    """Print the table, the notes that explain it, the skipped plans, and the best plan for each budget.

    The table is as wide as the terminal. Needs rich (`pip install fewkeys[report]`).
    """
    screen = console() if screen is None else screen
    names, styles, sections = [], [], {}
    budgets = list(dict.fromkeys(row.budget for row in report.rows))
    rows = sorted(report.rows, key=lambda row: budgets.index(row.budget))
    for number, row in enumerate(rows):
        if row.budget is not None and (not number or rows[number - 1].budget != row.budget):
            sections[number] = f"{row.budget} slots"
        star = starred(report, row)
        names.append(f"  {row.name}{' *' if star else ''}")
        styles.append({"exact": "dim", "oracle": "italic cyan"}.get(row.kind, "bold green" if star else ""))
    cells = [_cells(report, row) for row in rows]
    drop = DROP | {AT.format(length): 1 for length in lengths(report)[1:-2]}
    drop |= {"cosine": 8} if report.whole_times else {}
    columns = [
        Column(name, [cell[name] for cell in cells], drop=drop.get(name, 0)) for name in (cells[0] if cells else ())
    ]
    columns = [Column("plan", names, "left"), *(column for column in columns if set(column.cells) != {"-"})]
    shown = print_columns(screen, columns, title=title(report), sections=sections, styles=styles)
    explained = " ".join(line for name, line in notes(report).items() if name in shown)
    for line in (explained, *skipped(report)):
        screen.print(line, style="dim", markup=False)
    for line in ("", *advice(report), "", headline(report)):
        screen.print(line, markup=False)


def starred(report: Report, row: Row) -> bool:
    """Whether no method of the row's budget has less error within its slots."""
    return row.budget is not None and row is best(report.rows, row.budget)


def lengths(report: Report) -> list[int]:
    """The lengths at which whole models were timed."""
    return sorted({item.length for item in report.whole_times})


TIMED = (
    "ms at a length: one text through a whole model of this shape, random weights, the plan in every layer. A dash: "
    "not timed."
)


def title(report: Report) -> str:
    """The model and its text in one line: no date, no path."""
    name = report.model.rstrip("/\\").replace("\\", "/").rpartition("/")[2] or report.model
    sequences = "1 sequence" if report.sequences == 1 else f"{report.sequences} sequences"
    whole = report.tokens == report.sequences * report.length
    size = f"{sequences} × {report.length} tokens" if whole else f"{sequences}, {report.tokens} tokens"
    return f"{name} · {size} · {report.layers} layers × {report.query_heads} heads"


def notes(report: Report) -> dict[str, str]:
    """The meaning of each column."""
    batch, _, length, _ = report.settings["timed_shape"]
    return {
        "slots": "slots: keys that a query attends to, plus the cost of stand-ins, on average.",
        "error": "error: |approximate - exact| / |exact| of a head's output, mean over queries, heads and layers.",
        "ms": f"ms: one layer's attention over {batch} × {length} tokens.",
        "p50": "p50, p90: the median of these errors, and the value that 90 % of them stay below.",
        "worst head": "worst head: the largest mean error of a head; L5 H6 is head 6 of layer 5, both counted from 0.",
        "mass": "mass: exact attention weight on the kept keys.",
        "recall": f"recall: share of exact weights >= {report.settings['eps']:g} that are kept.",
        "cosine": "cosine: mean-pooled last hidden states, every layer approximated, against the exact model.",
        **(
            {AT.format(max(lengths(report))): TIMED}
            if report.whole_times
            else {"speed": "speed: exact attention's time / the plan's."}
        ),
        "plan": "(oracle): computes every score to pick its keys; a reference, not a method. *: the method with the "
        "least error within its budget of slots.",
    }


def skipped(report: Report) -> list[str]:
    """The plans without a row, each with its reason and the budgets it concerns."""
    budgets: dict[tuple[str, str], list[str]] = {}
    for item in report.skipped:
        budgets.setdefault((item.name, item.reason), []).append("" if item.budget is None else str(item.budget))
    return [f"left out: {name}{_at(numbers)}: {reason}" for (name, reason), numbers in budgets.items()]


def advice(report: Report) -> list[str]:
    """For each budget the method with the least error, against the best oracle and exact attention."""
    lines = []
    for budget in report.settings["budgets"] or [None]:
        row, bound = best(report.rows, budget), oracle(report.rows, budget)
        where = "Best" if budget is None else f"Best within {budget} slots"
        if row is None:
            lines.append(f"{where}: no method stayed within the budget.")
            continue
        line = f"{where}: {row.name} [{row.plan}], error {row.error:.3f}"
        if bound is not None and bound.error > 0:
            line += f" = {row.error / bound.error:.2f} × the best oracle's"
        lines.append(f"{line}{'' if report.whole_times else _speed(row)}.")
    return lines


def _at(numbers: list[str]) -> str:
    slots = ", ".join(filter(None, numbers))
    return f" at {slots} slots" if slots else ""


def _speed(row: Row) -> str:
    fast, slow = row.exact_ms / row.ms, row.ms / row.exact_ms
    speed = f"{fast:.1f} times as fast as" if fast >= 1 else f"{slow:.1f} times as slow as"
    return f"; {speed} exact attention at this length"


def _cells(report: Report, row: Row) -> dict[str, str]:
    layer, head = row.worst_head
    cells = {
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
        return cells | {"ms": f"{row.ms:.1f}", "speed": f"{row.exact_ms / row.ms:.2f}×"}
    times = whole_ms(report, row)
    return cells | {
        AT.format(length): f"{times[length]:,.0f}" if length in times else "-" for length in lengths(report)
    }


def whole_ms(report: Report, row: Row) -> dict[int, float]:
    """By length, the milliseconds of a whole model under a row's plan, or with exact attention."""
    if row.kind != "exact":
        return {item.length: item.ms for item in times_of(report, row)}
    return {item.length: item.exact_ms for item in report.whole_times}
