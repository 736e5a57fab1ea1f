"""Checks of a report that was read from a file, so that the code that shows it can trust it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from fewkeys.core.records import build
from fewkeys.judge.row import Row, Skipped, WholeTime

SIZES = ("layers", "query_heads", "kv_heads", "head_dim", "value_dim", "sequences", "length", "tokens")
KINDS = ("exact", "oracle", "method")
MOST = 2**63 - 1
"""The largest whole number of a report."""


@dataclass(frozen=True)
class _Settings:
    """The settings that tables and figures use; a report may have others."""

    eps: float
    budgets: list[int] | None
    timed_shape: list[int]
    text: list[str] | None = None


@dataclass(frozen=True)
class _Machine:
    """The facts of the machine that tables and figures use; a report may have others."""

    cpu: str
    threads: int


def check_report(
    sizes: Mapping[str, int],
    settings: Mapping[str, Any],
    machine: Mapping[str, Any],
    rows: Sequence[Row],
    skipped: Sequence[Skipped],
) -> None:
    """Raise `ValueError` for parts that cannot be shown. The message names the part, what was expected and what came.

    `sizes`: the numbers of the report that are named in `SIZES`.
    """
    for name, size in sizes.items():
        _count(name, size)
    shown = _part(_Settings, settings)
    _expect("settings.timed_shape", "four numbers", shown.timed_shape, len(shown.timed_shape) == 4)
    for number in (*shown.timed_shape, *(shown.budgets or [])):
        _count("settings", number)
    _part(_Machine, machine)
    names = [(row.name, row.budget) for row in rows]
    unique = len(set(names)) == len(names)
    _expect("rows", "one row for a name and budget", max(names, key=names.count, default=None), unique)
    for number, row in enumerate(rows):
        _check_row(f"rows[{number}]", row, sizes["layers"], sizes["query_heads"])
    for item in skipped:
        _count("skipped: budget", 1 if item.budget is None else item.budget)


def check_times(times: Sequence[WholeTime], rows: Sequence[Row]) -> None:
    """Raise `ValueError` for times of whole models that are no times, or of plans without a row."""
    names = {(row.name, row.budget) for row in rows}
    for number, item in enumerate(times):
        name = f"whole_times[{number}]"
        _expect(name, "the name and budget of a row", (item.name, item.budget), (item.name, item.budget) in names)
        _count(f"{name}.length", item.length)
        _count(f"{name}.turns", item.turns)
        for time in (item.ms, item.exact_ms):
            _expect(name, "times above 0", time, time > 0)


def _check_row(name: str, row: Row, layers: int, heads: int) -> None:
    _count(f"{name}.budget", 1 if row.budget is None else row.budget)
    _expect(f"{name}.kind", f"one of {', '.join(KINDS)}", row.kind, row.kind in KINDS)
    for time in ("ms", "exact_ms"):
        _expect(f"{name}.{time}", "a time above 0", getattr(row, time), getattr(row, time) > 0)
    for part in ("slots", "error", "error_p50", "error_p90", "worst_head_error", "mass"):
        _expect(f"{name}.{part}", "a number of at least 0", getattr(row, part), getattr(row, part) >= 0)
    worst = row.worst_head
    inside = len(worst) == 2 and 0 <= worst[0] < layers and 0 <= worst[1] < heads
    _expect(f"{name}.worst_head", f"a layer below {layers} and a head below {heads}", worst, inside)
    for part, numbers in row.per_layer.items():
        _expect(f"{name}.per_layer.{part}", f"{layers} numbers", numbers, len(numbers) == layers)
    for part, table in row.per_head.items():
        fits = len(table) == layers and all(len(line) == heads for line in table)
        _expect(f"{name}.per_head.{part}", f"{layers} lists of {heads} numbers", table, fits)
    errors = row.per_head.get("error", [[None]])
    whole = all(error is not None for line in errors for error in line)
    _expect(f"{name}.per_head.error", "a number for every head", row.per_head.get("error"), whole)


def _part(kind: type[Any], data: Mapping[str, Any]) -> Any:
    names = {field.name for field in fields(kind)}
    return build(kind, {name: value for name, value in data.items() if name in names})


def _count(name: str, value: int) -> None:
    _expect(name, f"whole numbers from 1 to {MOST}", value, 1 <= value <= MOST)


def _expect(name: str, wanted: str, value: object, fits: bool) -> None:
    if not fits:
        raise ValueError(f"{name}: expected {wanted}, got {str(value)[:60]}")
