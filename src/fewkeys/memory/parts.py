"""A causal plan in the terms of a stream."""

from __future__ import annotations

from dataclasses import dataclass

from fewkeys.plan import Plan
from fewkeys.select.base import Recent

NEVER = 2**62
"""A position that no sequence reaches."""
WINDOW_UNIT = 32
"""`Parts.unit` without recent blocks."""


@dataclass(frozen=True)
class Parts:
    """The numbers of a plan that a stream needs. All queries of a `unit` of positions see the same memory."""

    window: int
    recent: Recent | None
    sinks: int
    means: int
    unit: int

    def near_from(self, position: int) -> int:
        """The first position in the recent blocks of the query at `position`; `NEVER` without recent blocks."""
        if self.recent is None:
            return NEVER
        return max(0, (position // self.recent.size - self.recent.blocks + 1) * self.recent.size)

    def needed_from(self, position: int) -> int:
        """The first position whose key the query at `position` may need."""
        return max(0, min(self.near_from(position), position - self.window + 1))


def parts_of(plan: Plan) -> Parts:
    """The parts of a plan. Raises `ValueError` for a plan that no stream supports."""
    if not isinstance(plan, Plan):
        raise TypeError(f"plan: expected a fewkeys.Plan, got {type(plan).__name__}; budget(slots, is_causal=True)")
    if plan.keep is None:
        raise ValueError("plan: exact attention must remember every key, so there is no stream of it; give keep=")
    window = sinks = 0
    recent: Recent | None = None
    for part in plan.parts:
        past = part.remembered
        if past is None or past.scan or (past.recent is not None and recent is not None):
            raise ValueError(f"plan: a stream keeps one RecentBlocks or a Window, and Sinks beside it, got {part}")
        window, sinks, recent = max(window, past.latest), max(sinks, past.first), past.recent or recent
    if plan.rest.running is None:
        raise ValueError(
            f"plan: a stream remembers the rest as RunningMeans(count) or drops it, got {plan.rest}; "
            "use budget(slots, is_causal=True)"
        )
    unit = WINDOW_UNIT if recent is None else recent.size
    return Parts(window, recent, sinks, plan.rest.running, unit)
