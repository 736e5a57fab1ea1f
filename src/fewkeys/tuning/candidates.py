"""The plans that tuning chooses from: splits of a number of slots."""

from dataclasses import dataclass, field
from itertools import product
from typing import Literal, NamedTuple

from fewkeys.plan import OWN_BLOCK, Plan, budget
from fewkeys.rest import BlockMeans, ClusterMeans, Drop, Rest, RunningMeans
from fewkeys.select import KeyScan, Leverage, Outliers, RecentBlocks, Selector, Sinks, Window, united

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
CAUSAL_BLOCKS = (4, 8, 16, 32, 64, 128)
CAUSAL_HEAVY = (0.0, 1 / 8, 1 / 4, 1 / 2, 3 / 4)


class Split(NamedTuple):
    """Shares of the slots: heavy keys, a window, and the rank of the first-order term. The others are cluster means."""

    heavy: float
    window: float
    rank: float


STEP = Split(1 / 16, 1 / 8, 1 / 16)
"""The change of a share between a candidate and its neighbours."""
STEP_SLOTS = 1 / 8
"""The relative change of the slots."""


@dataclass(frozen=True)
class Candidate:
    """A plan and its slots: the most keys of a query (of recent blocks: on average over a block), plus stand-ins.
    `split`: the shares that it was made from, if any.
    """

    plan: Plan
    slots: int
    split: Split | None = field(default=None, compare=False)


def splits(
    slots: int,
    *,
    is_causal: bool,
    keys: int,
    width: int,
    memory: Literal["all", "constant"] = "all",
    biased: bool = False,
) -> list[Candidate]:
    """`budget(slots)` (with a causal bias of the distance, `biased`, sinks and a window), the plans that `fewkeys.tune`
    names at every level, and exact attention over `keys` keys. width: D + Dv, for the price of the first-order term.
    """
    listed, searched = is_causal and biased, is_causal and memory == "all" and not biased
    first = _near(slots) if listed else budget(slots, is_causal=is_causal, memory=memory)
    candidates = [Candidate(first, slots)]
    for level in SEARCHED if searched else LEVELS:
        size = max(2, round(slots * level))
        if size >= keys:
            continue
        if is_causal:
            plans = _searched(size, slots) if searched else _lists(size) if listed else _running(size) + _lists(size)
            candidates += [Candidate(plan, size) for plan in plans]
        else:
            for shares in product(HEAVY, WINDOW, RANK):
                candidates += _split(size, Split(*shares), width)
    # A scan for as many keys as the capture has keeps all of them; in a longer cache it would choose.
    candidates.append(Candidate(_scan(keys, 1) if searched else Plan(), keys))
    return list(dict.fromkeys(candidates))


def variants(candidate: Candidate, *, width: int) -> list[Candidate]:
    """The neighbours: more or less of a share or of the slots."""
    split, candidates = candidate.split, list[Candidate]()
    if split is None:
        return candidates
    for name, step in STEP._asdict().items():
        for share in (getattr(split, name) + step, getattr(split, name) - step):
            if share >= 0:
                candidates += _split(candidate.slots, split._replace(**{name: share}), width)
    for factor in (1 - STEP_SLOTS, 1 + STEP_SLOTS):
        candidates += _split(round(candidate.slots * factor), split, width)
    return candidates


def _split(slots: int, split: Split, width: int) -> list[Candidate]:
    """The candidate of these shares; none where no two means are left."""
    outliers, ranks = max(1, int(slots * split.heavy)), int(slots * split.rank)
    near = int(slots * split.window) | 1 if split.window else 0
    means = slots - outliers - ranks - near
    if ranks:  # the factors of the first-order term cost means / width slots
        means -= -(-means // (width + 1))
    if means < 2:
        return []
    kept = [Outliers(outliers, means, COHORTS), *([Window(near)] if near else [])]
    plan = Plan(united(kept), ClusterMeans(means, ranks, COHORTS), exact_if_faster=True)
    return [Candidate(plan, slots, split)]


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


def _running(slots: int) -> list[Plan]:
    plans = []
    for block, sinks in product(CAUSAL_BLOCKS, (0, SINKS)):
        means = slots - (block + block // 2 + 1) - sinks
        if means > 0:
            plans.append(_with_sinks(sinks, RecentBlocks(block), RunningMeans(means)))
    return plans


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


def _with_sinks(sinks: int, keep: Selector, rest: Rest = Drop()) -> Plan:
    return Plan(Sinks(sinks) | keep if sinks else keep, rest, exact_if_faster=True)
