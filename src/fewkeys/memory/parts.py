"""What the parts of a causal plan mean to a stream."""

from __future__ import annotations

from dataclasses import dataclass

from fewkeys.plan import Plan
from fewkeys.select.base import Best, Recent
from fewkeys.select.causal import CAUSAL_BLOCK

NEVER = 2**62


@dataclass(frozen=True)
class Parts:
    """A plan as a stream runs it.

    `unit`: positions between two moments at which the memory changes; every query between them sees the same memory.
    """

    window: int
    recent: Recent | None
    sinks: int
    heavy: tuple[Best, ...]
    means: int
    unit: int

    @property
    def aligned(self) -> int:
        """Positions at a multiple of which another stream's memory can follow this one's."""
        return max(self.unit, CAUSAL_BLOCK if self.heavy else 1, 1 if self.recent is None else self.recent.size)

    def near_from(self, position: int) -> int:
        """The first position that the recent blocks of the query at `position` reach; without any, one never met."""
        if self.recent is None:
            return NEVER
        return max(0, (position // self.recent.size - self.recent.blocks + 1) * self.recent.size)

    def needed_from(self, position: int) -> int:
        """The first position whose key the query at `position`, and the next choice of heavy keys, may ask for."""
        chosen = position // CAUSAL_BLOCK * CAUSAL_BLOCK if self.heavy else position
        return max(0, min(self.near_from(position), position - self.window + 1, chosen))


def parts_of(plan: Plan) -> Parts:
    """The parts of a plan that a stream can run; `ValueError` for others."""
    if not isinstance(plan, Plan):
        raise TypeError(f"plan: expected a fewkeys.Plan, got {type(plan).__name__}; budget(slots, is_causal=True)")
    if plan.keep is None:
        raise ValueError("plan: exact attention must remember every key, so there is no stream of it; give keep=")
    window = sinks = 0
    recent: Recent | None = None
    heavy: list[Best] = []
    for part in plan.parts:
        held = part.remembered
        if held is None or held.scan or (held.recent is not None and recent is not None):
            raise ValueError(
                "plan: a stream keeps one RecentBlocks or a Window, and Sinks, Leverage(count), KeyNorm or RandomKeys "
                f"beside it, got {part}"
            )
        window, sinks, recent = max(window, held.latest), max(sinks, held.first), held.recent or recent
        heavy += [] if held.best is None else [held.best]
    if plan.rest.running is None:
        raise ValueError(
            f"plan: a stream remembers the rest as RunningMeans(count) or drops it, got {plan.rest}; "
            "use budget(slots, is_causal=True)"
        )
    unit = CAUSAL_BLOCK if recent is None else min(recent.size, CAUSAL_BLOCK) if heavy else recent.size
    return Parts(window, recent, sinks, tuple(heavy), plan.rest.running, unit)
