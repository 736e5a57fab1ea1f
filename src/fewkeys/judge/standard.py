"""The plans that every comparison shows: bounds, controls, known methods, and ours."""

from fewkeys.core.validation import check_count
from fewkeys.plan import Plan, budget
from fewkeys.select import BestColumns, KeyNorm, Leverage, RandomKeys, Sinks, TopK, Window

OURS = "fewkeys budget"
"""The row of the recommended plan."""
CONTROLS = ("random keys", "key norm")
"""The rows that a method must beat."""
SINKS = 4
"""First keys of "sinks + window", as many as streaming attention keeps (arXiv 2309.17453)."""


def standard_plans(slots: int, *, is_causal: bool = False, length: int | None = None) -> dict[str, Plan]:
    """Every standard row at `slots` >= 1 slots per query, by its name in tables and figures.

    Oracles compute all scores and are bounds only: the top keys of each query, and the keys with the largest total
    weight, the same for all queries of a head. "leverage (LevAttention)" (arXiv 2410.05462) and "leverage + window" are
    of raw keys. "fewkeys budget" is exact attention if `slots` pay for all keys of `length`.
    """
    check_count("slots", slots)
    sinks, half = min(SINKS, slots), slots // 2
    keeps = {
        "exact": None,
        "top-k per query (oracle)": TopK(slots),
        "best shared columns (oracle)": BestColumns(slots),
        "random keys": RandomKeys(slots),
        "key norm": KeyNorm(slots),
        "window": Window(slots),
        "sinks + window": Sinks(sinks) | Window(slots - sinks) if slots > sinks else Sinks(sinks),
        "leverage (LevAttention)": Leverage(slots),
        "leverage (centred)": Leverage(slots, centre=True),
        "leverage + window": Leverage(half) | Window(slots - half) if half else Window(slots),
    }
    return {name: Plan(keep) for name, keep in keeps.items()} | {
        OURS: budget(slots, is_causal=is_causal) if length is None or slots < length else Plan(),
    }
