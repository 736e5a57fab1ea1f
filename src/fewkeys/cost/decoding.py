"""The length up to which exact attention answers a token of a stream faster than a scan.

A token after n others takes `a + b n` by exact attention and `c + d n` by a scan. Both lines go through two short runs
on random inputs when a stream of such heads first answers a query, and are kept (`fewkeys.cost.kept`).
"""

import math
from collections.abc import Callable
from functools import lru_cache

from torch import Tensor

from fewkeys.core.inputs import Inputs
from fewkeys.core.precision import full_precision
from fewkeys.cost.crossover import ADVANTAGE, SHIPPED, Call, Line, Setting, through, timed_pairs
from fewkeys.cost.kept import Numbers, kept
from fewkeys.cost.operations import plan_work
from fewkeys.plan import Plan

LENGTHS = (1024, 8192)
NEVER = 2**62

Tokens = Callable[[Plan, Inputs], tuple[Call, Call]]
"""Calls that process one more token after those of the inputs: by exact attention, and by the plan."""


def exact_length(plan: Plan, query: Tensor, key: Tensor, value: Tensor, tokens: Tokens) -> int:
    """The number of first tokens of a `KeyScan` stream that exact attention answers, whatever the sizes of pieces.

    All on a GPU, which has no kernel for a scan.
    """
    if not plan.exact_if_faster:
        return 0
    if query.device.type != "cpu":
        return NEVER
    return _length(plan, Setting.of(query, key, value, is_causal=True), tokens)


@lru_cache(256)
def _length(plan: Plan, setting: Setting, tokens: Tokens) -> int:
    numbers = kept(setting.facts() | {"decoding": plan.to_dict()}, lambda: _measured(plan, setting, tokens))
    if numbers is None:
        return math.ceil(plan_work(setting.draw(LENGTHS[0], queries=1), plan).scores / SHIPPED)
    return crossing(Line(*numbers[0]), Line(*numbers[1]))


def crossing(of_exact: Line, of_plan: Line, share: float = ADVANTAGE) -> int:
    """The number of keys from which on the plan takes at most this share of exact attention's time."""
    gained = share * of_exact.slope - of_plan.slope
    behind = of_plan.fixed - share * of_exact.fixed
    if behind <= 0:
        return 0
    return math.ceil(behind / gained) if gained > 0 else NEVER


@full_precision()
def _measured(plan: Plan, setting: Setting, tokens: Tokens) -> tuple[Numbers, bool]:
    calls = zip(*(tokens(plan, setting.draw(length, queries=1)) for length in LENGTHS), strict=True)
    points = [(float(length), call) for line in calls for length, call in zip(LENGTHS, line, strict=True)]
    pairs, calm = timed_pairs(points, setting)
    few, many = pairs[0]
    is_sound = calm and few[1] < many[1]  # exact attention takes longer with more keys
    return tuple(through(pair) for pair in pairs), is_sound
