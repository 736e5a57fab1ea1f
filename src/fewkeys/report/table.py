"""The table of a comparison, and what to conclude from it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fewkeys.judge.pareto import best, front, oracle
from fewkeys.judge.result import Report, Row

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

WIDE = 116
"""Characters the whole table needs."""

COLUMNS = ("slots", "error", "p50", "p90", "worst head", "mass", "recall", "cosine", "ms", "speed")
EXTRA = ("p50", "p90", "worst head", "recall")
"""Columns that narrower terminals leave to the JSON."""


def print_table(report: Report, console: Console | None = None) -> None:
    """Print the table, the notes that explain it, the plans left out, and the best plan for each budget.

    Output that goes to a file or pipe is laid out `WIDE` characters wide. Needs rich (`pip install fewkeys[report]`).
    """
    from rich.console import Console

    if console is None:
        console = Console(highlight=False)
        if not console.is_terminal:
            console = Console(highlight=False, width=WIDE)
    console.print(_table(report, wide=console.width >= WIDE))
    for line in (*notes(report), *skipped(report)):
        console.print(line, style="dim", markup=False)
    console.print()
    for line in advice(report):
        console.print(line, markup=False)


def title(report: Report) -> str:
    """The model and what it read, in one line: no date, no path."""
    name = report.model.rstrip("/\\").replace("\\", "/").rpartition("/")[2] or report.model
    sequences = "1 sequence" if report.sequences == 1 else f"{report.sequences} sequences"
    whole = report.tokens == report.sequences * report.length
    size = f"{sequences} × {report.length} tokens" if whole else f"{sequences}, {report.tokens} tokens"
    return f"{name} · {size} · {report.layers} layers × {report.query_heads} heads"


def notes(report: Report) -> list[str]:
    """What the columns mean."""
    batch, _, length, _ = report.settings["timed_shape"]
    return [
        "error: |approximate - exact| / |exact| of a head's output, mean over queries, heads and layers. "
        "mass: exact attention weight on the kept keys.",
        f"recall: share of exact weights >= {report.settings['eps']:g} that are kept. "
        "cosine: mean-pooled last hidden states, every layer approximated, against the exact model.",
        f"ms: one layer's attention over {batch} × {length} tokens; speed: exact attention's time / the plan's. "
        "*: no method here has less error for as few slots.",
    ]


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
        row, bound = best(report, budget), oracle(report, budget)
        where = "Best" if budget is None else f"Best within {budget} slots"
        if row is None:
            lines.append(f"{where}: no method stayed within the budget.")
            continue
        line = f"{where}: {row.name} [{row.plan}], error {row.error:.3f}"
        if bound is not None and bound.error > 0:
            line += f" = {row.error / bound.error:.2f} × the best oracle's"
        ratio = row.exact_ms / row.ms
        speed = f"{ratio:.1f} times as fast as" if ratio >= 1 else f"{1 / ratio:.1f} times as slow as"
        lines.append(f"{line}; {speed} exact attention at this length.")
    return lines


def _at(numbers: list[str]) -> str:
    found = [number for number in numbers if number]
    return f" at {', '.join(found)} slots" if found else ""


def _table(report: Report, *, wide: bool) -> Table:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(title=title(report), box=SIMPLE_HEAD, collapse_padding=True, pad_edge=False)
    table.title_style = "bold"
    table.add_column("plan", no_wrap=True)
    for name in [name for name in COLUMNS if wide or name not in EXTRA]:
        table.add_column(name, justify="right", no_wrap=True, min_width=max(5, len(name)))  # the name gives way
    stars = {(row.name, row.budget) for row in front(report.rows)}
    for budget in dict.fromkeys(row.budget for row in report.rows):
        if budget is not None:
            table.add_section()
            table.add_row(f"{budget} slots", style="bold")
        winner = best(report, budget)
        for row in (row for row in report.rows if row.budget == budget):
            style = {"exact": "dim", "oracle": "italic cyan"}.get(row.kind, "bold green" if row is winner else "")
            star = "*" if (row.name, row.budget) in stars else ""
            table.add_row(f"  {row.name} {star}".rstrip(), *_cells(row, wide=wide), style=style)
    return table


def _cells(row: Row, *, wide: bool) -> list[str]:
    layer, head = row.worst_head
    cells = {
        "slots": f"{row.slots:.1f}",
        "error": f"{row.error:.3f}",
        "p50": f"{row.error_p50:.3f}",
        "p90": f"{row.error_p90:.3f}",
        "worst head": f"{row.worst_head_error:.2f} ({layer}.{head})",
        "mass": f"{row.mass:.3f}",
        "recall": "-" if row.recall is None else f"{row.recall:.3f}",
        "cosine": "-" if row.cosine is None else f"{row.cosine:.4f}",
        "ms": f"{row.ms:.1f}",
        "speed": f"{row.exact_ms / row.ms:.2f}×",
    }
    return [cell for name, cell in cells.items() if wide or name not in EXTRA]
