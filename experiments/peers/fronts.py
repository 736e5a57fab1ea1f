"""Error against time: the front of every row, and whether it lies anywhere below ours."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from experiments.peers.registry import OURS, PEERS, PLAIN

Row = dict[str, Any]


def front(rows: Iterable[Row]) -> list[Row]:
    """The timed rows that no other beats in both error and time, the fastest first."""
    best: list[Row] = []
    for row in sorted((row for row in rows if row["ms"] is not None), key=lambda row: (row["ms"], row["error"])):
        if not best or row["error"] < best[-1]["error"]:
            best.append(row)
    return best


def fronts(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """The front of each row of the table that has one, in the table's order."""
    by_peer = {name: front(row for row in rows if row["peer"] == name) for name in PEERS}
    return {name: best for name, best in by_peer.items() if best}


def below(points: Sequence[Row], others: Sequence[Row], exact: float, worst: float = 1.0) -> list[Row]:
    """The points of a front that are better than all of `others`.

    A point counts where it is faster than exact attention, whose error is 0, and better than `worst`, the error of an
    answer that costs nothing: of the mean of all values, or 1, that of zeros.
    """
    return [
        row
        for row in points
        if row["error"] < worst
        and row["ms"] < exact
        and not any(other["ms"] <= row["ms"] and other["error"] <= row["error"] for other in others)
    ]


def rivals_below(rows: Sequence[Row], exact: float, worst: float = 1.0, ours: str = OURS) -> dict[str, list[Row]]:
    """The rivals and controls whose front lies anywhere below ours, and where. `ours` may be `PLAIN`."""
    all_fronts = fronts(rows)
    better = {
        name: below(points, all_fronts.get(ours, []), exact, worst)
        for name, points in all_fronts.items()
        if PEERS[name].kind in ("rival", "control")
    }
    return {name: points for name, points in better.items() if points}


__all__ = ["PLAIN", "below", "front", "fronts", "rivals_below"]
