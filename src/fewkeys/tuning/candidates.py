"""The plans that tuning chooses from: splits of a number of slots."""

from itertools import product
from typing import NamedTuple

from fewkeys.plan import OWN_BLOCK, Plan, budget
from fewkeys.rest import BlockMeans, ClusterMeans
from fewkeys.select import KeyScan, Leverage, Outliers, Selector, Sinks, Window, united

LEVELS = (3 / 8, 1 / 2, 3 / 4, 1.0, 11 / 8, 15 / 8, 5 / 2, 4.0)
"""Slots of a head, in units of the mean."""
SEARCHED = (1 / 8, 1 / 4, *LEVELS, 6.0)
"""The same for scans: where every query chooses its own keys, heads differ more."""
COHORTS = 32
SINKS = 4
HEAVY, WINDOW, RANK = (1 / 8, 3 / 8, 9 / 16), (0.0, 1 / 5, 2 / 5), (0.0, 1 / 8, 1 / 4)
"""Shares of the slots that are tried."""
SCAN_MEANS = (1 / 32, 1 / 8)
"""Shares of the slots for means beside a scan."""
CAUSAL_HEAVY = (0.0, 1 / 8, 1 / 4, 1 / 2, 3 / 4)


class Candidate(NamedTuple):
    """A plan and its slots: the most keys of a query, plus stand-ins."""

    plan: Plan
    slots: int


def splits(slots: int, *, is_causal: bool, keys: int, width: int, biased: bool = False) -> list[Candidate]:
    """`budget(slots)` (with a causal bias of the distance, `biased`, sinks and a window), the plans that `fewkeys.tune`
    names at every level, and exact attention over `keys` keys. width: D + Dv, for the price of the first-order term.
    """
    searched = is_causal and not biased
    first = _near(slots) if is_causal and biased else budget(slots, is_causal=is_causal)
    candidates = [Candidate(first, slots)]
    for level in SEARCHED if searched else LEVELS:
        size = max(2, round(slots * level))
        if size >= keys:
            continue
        if searched:
            plans = _searched(size, slots)
        else:
            plans = _lists(size) if is_causal else _of_cohorts(size, width)
        candidates += [Candidate(plan, size) for plan in plans]
    # A scan for as many keys as the capture has keeps all of them; in a longer cache it would choose.
    candidates.append(Candidate(_scan(keys, 1) if searched else Plan(), keys))
    return list(dict.fromkeys(candidates))


def _of_cohorts(slots: int, width: int) -> list[Plan]:
    """Splits into outliers, a window, the rank of the first-order term and at least two means."""
    plans = []
    for heavy, window, rank in product(HEAVY, WINDOW, RANK):
        outliers, ranks = max(1, int(slots * heavy)), int(slots * rank)
        near = int(slots * window) | 1 if window else 0
        means = slots - outliers - ranks - near
        if ranks:  # the factors of the first-order term cost means / width slots
            means -= -(-means // (width + 1))
        if means >= 2:
            kept = [Outliers(outliers, means, COHORTS), *([Window(near)] if near else [])]
            plans.append(Plan(united(kept), ClusterMeans(means, ranks, COHORTS), exact_if_faster=True))
    return plans


def _searched(slots: int, mean: int) -> list[Plan]:
    """Scans with few and many means; for heads that need less than the mean, sinks and a window."""
    many = [max(1, int(slots * share)) for share in SCAN_MEANS]
    scans = [_scan(slots - OWN_BLOCK - means, means) for means in many if slots > OWN_BLOCK + means]
    return [*scans, _near(slots)] if SINKS < slots < mean else scans


def _scan(count: int, means: int) -> Plan:
    return Plan(KeyScan(count), BlockMeans(means), exact_if_faster=True)


def _near(slots: int) -> Plan:
    sinks = SINKS if slots > SINKS else 0
    return _with_sinks(sinks, Window(slots - sinks))


def _lists(slots: int) -> list[Plan]:
    """Sinks, centred leverage and a window, without stand-ins."""
    plans = []
    for share, sinks in product(CAUSAL_HEAVY, (0, 1, SINKS)):
        heavy = int(slots * share)
        window = slots - heavy - sinks
        if window > 0:
            keep = Leverage(heavy, centre=True) | Window(window) if heavy else Window(window)
            plans.append(_with_sinks(sinks, keep))
    return plans


def _with_sinks(sinks: int, keep: Selector) -> Plan:
    return Plan(Sinks(sinks) | keep if sinks else keep, exact_if_faster=True)
