"""The Pareto front of error against slots, and the best rows of a budget."""

from __future__ import annotations

from collections.abc import Iterable

from fewkeys.judge.row import Row


def front(rows: Iterable[Row]) -> list[Row]:
    """Rows that no other row beats, by slots, ascending: no other has both less error and no more slots.

    Oracles and exact attention are left out. Cost: one sort.
    """
    best = float("inf")
    kept = []
    for row in sorted(methods(rows), key=lambda row: (row.slots, row.error)):
        if row.error < best:
            best = row.error
            kept.append(row)
    return kept


def methods(rows: Iterable[Row]) -> list[Row]:
    """The rows that could save work: neither oracles nor exact attention."""
    return [row for row in rows if row.kind == "method"]


def best(rows: Iterable[Row], budget: int | None) -> Row | None:
    """The method with the least error among the rows of `budget` that used no more slots; None if there is none."""
    limit = float("inf") if budget is None else budget + 1e-6
    fair = [row for row in methods(rows) if row.budget == budget and row.slots <= limit]
    return min(fair, key=lambda row: row.error, default=None)


def oracle(rows: Iterable[Row], budget: int | None) -> Row | None:
    """The oracle with the least error at `budget`, a bound for methods; None if there is none."""
    bounds = [row for row in rows if row.kind == "oracle" and row.budget == budget]
    return min(bounds, key=lambda row: row.error, default=None)
