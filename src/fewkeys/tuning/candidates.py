"""The plans that tuning chooses from: how a number of slots may be split, and which rule picks the heavy keys."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import product
from typing import Literal

from fewkeys.plan import LEAST_SCANNED, OWN_BLOCK, Plan, budget
from fewkeys.rest import BlockMeans, ClusterMeans, RunningMeans
from fewkeys.select import KeyScan, Leverage, Outliers, RecentBlocks, Selector, Sinks, Window, united

LEVELS = (3 / 8, 1 / 2, 3 / 4, 1.0, 11 / 8, 15 / 8, 5 / 2, 4.0)
"""Slots a head may get, in units of the mean."""
SEARCHED = (1 / 8, 1 / 4, *LEVELS, 6.0)
"""The same where every query chooses its own keys: heads differ more."""
RANK = 0.0, 1 / 8, 1 / 4
COHORTS, HEAVY, WINDOW = 32, (1 / 8, 3 / 8, 9 / 16), (0.0, 1 / 5, 2 / 5)
"""Shares of the slots. The remaining slots are cluster means."""
STEP = {"heavy": 1 / 16, "window": 1 / 8, "rank": 1 / 16}
STEP_SLOTS = 1 / 8
"""The step from a split to its neighbours."""
SCAN_MEANS = (1 / 32, 1 / 8)
"""Shares of the slots that are means beside a scan."""
CAUSAL_BLOCKS = (4, 8, 16, 32, 64, 128)
CAUSAL_HEAVY = (0.0, 1 / 8, 1 / 4, 1 / 2, 3 / 4)
SINKS = 4


@dataclass(frozen=True)
class Candidate:
    """A plan and the slots that a query pays for it: the most that it can keep (of recent blocks: on average over a
    block), plus its stand-ins.

    `split` are the shares of heavy keys, window and rank that it was made from; None where it was not.
    """

    plan: Plan
    slots: int
    split: tuple[float, float, float] | None = field(default=None, compare=False)

    @property
    def clusters(self) -> int:
        """The number of clusters of the plan (0: none). Candidates that share clusters run one after another."""
        return self.plan.rest.clusters


def splits(
    slots: int,
    *,
    is_causal: bool,
    keys: int,
    width: int,
    memory: Literal["all", "constant"] = "all",
    biased: bool = False,
) -> list[Candidate]:
    """`budget(slots)`, every coarse split at every level, and exact attention over `keys` keys; in a fixed order.

    `biased`: scores have a bias of the distance; then causal without scans and running means, sinks and a window first.

    `width` is D + Dv, by which the price of the first-order term's factors is counted.

    Not causal: outliers, window, rank of the first-order term and cluster means, for cohorts of queries. Causal: scans,
    and sinks with small windows; in constant memory, recent blocks and running means, with and without sinks; and
    sinks, leverage (centred) and window.
    """
    listed, searched = is_causal and biased, is_causal and memory == "all" and not biased
    first = _near(slots) if listed else budget(slots, is_causal=is_causal, memory=memory)
    candidates = [Candidate(first, slots)]
    for level in SEARCHED if searched else LEVELS:
        size = max(2, round(slots * level))
        if size >= keys:
            continue
        if is_causal:
            candidates += _searched(size, slots) if searched else _lists(size) if listed else _causal_splits(size)
        else:
            shares = product(HEAVY, WINDOW, RANK)
            candidates += [split for each in shares if (split := _split(size, *each, width)) is not None]
    # A scan for as many keys as the capture has keeps all of them; in a longer cache it would choose.
    candidates.append(Candidate(_scan(keys, 1) if searched else Plan(), keys))
    return list(dict.fromkeys(candidates))


def variants(candidate: Candidate, *, width: int) -> list[Candidate]:
    """The neighbours of a candidate: a little more or less of each share and of the slots, or other rules for the heavy
    keys.
    """
    plan, candidates = candidate.plan, []
    if candidate.split is not None:
        shares = [list(candidate.split) for _ in range(2 * len(STEP))]
        for number, step in enumerate(STEP.values()):
            shares[2 * number][number] += step
            shares[2 * number + 1][number] -= step
        sizes = [round(candidate.slots * factor) for factor in (1 - STEP_SLOTS, 1 + STEP_SLOTS)]
        near = [
            (candidate.slots, heavy, window, rank) for heavy, window, rank in shares if min(heavy, window, rank) >= 0
        ]
        near += [(size, *candidate.split) for size in sizes]
        candidates += [split for each in near if (split := _split(*each, width)) is not None]
    for number, part in enumerate(plan.parts):
        for other in part.alternatives:
            keep = united([*plan.parts[:number], other, *plan.parts[number + 1 :]])
            candidates.append(Candidate(replace(plan, keep=keep), candidate.slots))
    return candidates


def _split(slots: int, heavy: float, window: float, rank: float, width: int) -> Candidate | None:
    """The plan of these shares, None where no two means are left."""
    outliers, ranks = max(1, int(slots * heavy)), int(slots * rank)
    near = int(slots * window) | 1 if window else 0
    means = slots - outliers - ranks - near
    if ranks:  # the factors of the first-order term cost means / width slots
        means -= -(-means // (width + 1))
    if means < 2:
        return None
    kept = [Outliers(outliers, means, COHORTS), *([Window(near)] if near else [])]
    plan = Plan(united(kept), ClusterMeans(means, ranks, COHORTS), exact_if_faster=True)
    return Candidate(plan, slots, (heavy, window, rank))


def _searched(slots: int, mean: int) -> list[Candidate]:
    """Scans with few and many means, and for heads that need less than the mean, sinks and a window."""
    many = [max(1, int(slots * share)) for share in SCAN_MEANS] if slots >= LEAST_SCANNED else []
    plans = [_scan(slots - OWN_BLOCK - means, means) for means in many if slots > OWN_BLOCK + means]
    if SINKS < slots < mean:
        plans.append(_near(slots))
    return [Candidate(plan, slots) for plan in plans]


def _scan(count: int, means: int) -> Plan:
    return Plan(KeyScan(count), BlockMeans(means), exact_if_faster=True)


def _near(slots: int) -> Plan:
    """Sinks and a window."""
    return Plan(Sinks(SINKS) | Window(slots - SINKS) if slots > SINKS else Window(slots), exact_if_faster=True)


def _causal_splits(slots: int) -> list[Candidate]:
    """In constant memory."""
    candidates = []
    for block, sinks in product(CAUSAL_BLOCKS, (0, SINKS)):
        means = slots - (block + block // 2 + 1) - sinks
        if means > 0:
            recent: Selector = RecentBlocks(block)
            plan = Plan(Sinks(sinks) | recent if sinks else recent, RunningMeans(means), exact_if_faster=True)
            candidates.append(Candidate(plan, slots))
    return candidates + _lists(slots)


def _lists(slots: int) -> list[Candidate]:
    """Sinks, leverage (centred) and a window, with nothing for the other keys."""
    candidates = []
    for share, sinks in product(CAUSAL_HEAVY, (0, 1, SINKS)):
        heavy = int(slots * share)
        if slots - heavy - sinks < 1:
            continue
        keep: Selector = Window(slots - heavy - sinks)
        if heavy:
            keep = Leverage(heavy, centre=True) | keep
        if sinks:
            keep = Sinks(sinks) | keep
        candidates.append(Candidate(Plan(keep, exact_if_faster=True), slots))
    return candidates
