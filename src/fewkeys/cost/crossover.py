"""Which of a plan and exact attention is the faster here: straight lines, measured on this machine and kept.

Exact attention takes `a + b` times the pairs of queries and keys; a plan takes `c + d` times the keys to prepare and
`e + f` times the queries to attend, which count for more as scans of all keys grow, by compiled kernels and by
operations of torch. Each line goes through two short runs on random inputs, made when `impl="auto"` first asks about a
plan: some tenths of a second, once a month for every plan, device, dtype, head size and number of threads of a machine
and version (`fewkeys.cost.kept`). All of them take turns, so that what disturbs one disturbs the others, and of each
the fastest counts; there are more turns as long as they bring faster ones, and where that does not end, or more work
takes less time, the lines are measured again soon. Which is faster is a function of the numbers that are kept: until
they expire, the same call goes the same way in every process.
The plan is taken where its line is clearly below, and torch's operations where they are clearly faster than the
kernels. Where nothing can be kept, nothing is measured either: operations decide, counted by `fewkeys.cost.operations`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, astuple, dataclass, replace
from functools import lru_cache, partial

import torch

from fewkeys.core.clock import clock
from fewkeys.core.impl import Impl
from fewkeys.core.inputs import Inputs
from fewkeys.core.learned import learned_parts
from fewkeys.core.validation import check_inputs
from fewkeys.cost.kept import Numbers, kept
from fewkeys.cost.operations import answered_queries, exact_operations, plan_operations, scan_share, visible_keys
from fewkeys.execute import dispatch, exact
from fewkeys.execute.problem import Problem
from fewkeys.native.build import identity
from fewkeys.native.tensors import DTYPES
from fewkeys.plan import Plan

ADVANTAGE = 0.85
"""The plan is taken where it is expected to need at most this share of exact attention's time: lines are not exact.
So are torch's operations, of the kernels' time."""
SHIPPED = 0.3
"""Where nothing is measured, the plan is taken where it has at most this share of exact attention's operations: a
cautious one, since plans do theirs in smaller pieces."""
EXACT_LENGTHS, PLAN_LENGTHS = (256, 1024), (2048, 4096)
HEADS = 2
FEWEST_TURNS, MOST_TURNS, CALM_TURNS = 4, 40, 3
"""Turns end once so many of them in a row brought no time down by more than `CALM`."""
CALM = 0.03
ENOUGH = 2000.0
"""Milliseconds after which they end in any case, but for the fewest."""


@dataclass(frozen=True)
class Line:
    """Milliseconds: `fixed + slope` times the number of units."""

    fixed: float
    slope: float

    def at(self, units: float) -> float:
        return self.fixed + self.slope * units


@dataclass(frozen=True)
class Setting:
    """What the lines depend on, beside the plan and the machine."""

    device: str
    dtype: str
    head_dim: int
    value_dim: int
    is_causal: bool
    heads: int
    gqa_ratio: int
    threads: int
    kernels: str


@dataclass(frozen=True)
class Expected:
    """Milliseconds that exact attention and the plan are expected to take; the plan by torch alone in `steps`, where
    there are kernels.
    """

    exact: float
    plan: float
    steps: float | None = None

    @property
    def exact_is_faster(self) -> bool:
        plan = self.plan if self.steps is None else min(self.plan, self.steps)
        return plan > ADVANTAGE * self.exact

    @property
    def kernels_lose(self) -> bool:
        return self.steps is not None and self.steps < ADVANTAGE * self.plan


def exact_is_faster(inputs: Inputs, plan: Plan) -> bool:
    """Whether exact attention is not clearly slower than the plan. Reads no data."""
    own, exact_ones = plan_operations(inputs, plan), exact_operations(inputs)
    # Where the plan has more arithmetic there is nothing to measure.
    if own >= exact_ones:
        return True
    found = expected(inputs, plan)
    return own > SHIPPED * exact_ones if found is None else found.exact_is_faster


def kernels_lose(inputs: Inputs, plan: Plan) -> bool:
    """Whether torch's operations are clearly faster than the compiled kernels. Reads no data."""
    found = expected(inputs, plan)
    return found is not None and found.kernels_lose


def expected(inputs: Inputs, plan: Plan) -> Expected | None:
    """The time that each would take on inputs of this size, by this machine's lines; None where none can be kept."""
    return inputs.remember(("expected", plan), lambda: _expected(inputs, plan))


def _expected(x: Inputs, plan: Plan) -> Expected | None:
    # Learned plans are of all heads of a layer; of others some heads tell as much.
    heads = x.kv_heads if any(learned_parts(plan)) else min(HEADS, x.kv_heads)
    compiled = x.query.device.type == "cpu" and x.query.dtype in DTYPES
    setting = Setting(
        *(str(x.query.device), str(x.query.dtype), x.head_dim, x.value_dim, x.is_causal, heads, x.gqa_ratio),
        *(torch.get_num_threads(), identity() if compiled else "none"),
    )
    lines = _lines(setting, plan)
    if lines is None:
        return None
    exact_line, *plan_lines = lines
    pairs, keys = x.batch * x.query_heads * x.queries * visible_keys(x), x.batch * x.kv_heads * x.keys
    rows = x.batch * x.query_heads * answered_queries(x, plan) * (1 + scan_share(x, plan))
    # As many heads as were measured, again and again: all pay what a plan prepares for a head, however short.
    times = x.batch * x.kv_heads / heads
    lines_of_plan = zip(*[iter(plan_lines)] * 2, strict=True)
    plans = [times * (prepare.at(keys / times) + attend.at(rows / times)) for prepare, attend in lines_of_plan]
    return Expected(exact_line.at(pairs), *plans)


@lru_cache(256)
def _lines(setting: Setting, plan: Plan) -> tuple[Line, ...] | None:
    """Those of exact attention, and of preparing and attending by all ways that a plan can take, as they are kept."""
    told = asdict(setting) | {"plan": plan.to_dict()}
    if setting.device.startswith("cuda"):
        told["device"] = torch.cuda.get_device_name(setting.device)
    found = kept(told, lambda: _measured(setting, plan))
    return None if found is None else tuple(Line(*row) for row in found)


def _measured(setting: Setting, plan: Plan) -> tuple[Numbers, bool]:
    """The lines, and whether they can be relied on."""
    points = _points(setting, plan)
    times, calm = fastest([call for _, call in points], torch.device(setting.device))
    told = [(units, ms) for (units, _), ms in zip(points, times, strict=True)]
    pairs = list(zip(told[::2], told[1::2], strict=True))
    return tuple(astuple(_through(pair)) for pair in pairs), calm and all(few[1] < many[1] for few, many in pairs)


def _points(setting: Setting, plan: Plan) -> list[tuple[float, Callable[[], object]]]:
    """Units of work and a call that does them: two points of each line."""
    found: list[tuple[float, Callable[[], object]]] = []
    keep = plan.keep
    if keep is None:
        raise ValueError("plan: expected one that chooses keys, got exact attention")
    for length in EXACT_LENGTHS:
        x = _inputs(setting, length)
        found.append((x.query_heads * length * visible_keys(x), partial(exact.attend, x, plan.weights)))
    impls: tuple[Impl, ...] = ("auto",) if setting.kernels == "none" else ("auto", "torch")
    for impl in impls:
        sizes = [replace(_inputs(setting, length), impl=impl) for length in PLAN_LENGTHS]

        def ready(x: Inputs) -> Problem:
            own = x.branch()  # which remembers nothing yet
            graph = keep.select(own)
            return Problem(own, graph, plan.rest.prepare(own, graph, plan.weights), plan.weights)

        found += [(float(x.kv_heads * x.keys), partial(ready, x)) for x in sizes]
        found += [
            (x.query_heads * x.keys * (1 + scan_share(x, plan)), partial(dispatch.attend, ready(x))) for x in sizes
        ]
    return found


def _inputs(setting: Setting, length: int) -> Inputs:
    s, draw = setting, torch.Generator("cpu").manual_seed(0)
    shapes = ((s.heads * s.gqa_ratio, s.head_dim), (s.heads, s.head_dim), (s.heads, s.value_dim))
    kind = (torch.device(s.device), getattr(torch, s.dtype.removeprefix("torch.")))
    sizes = ((1, heads, length, dim) for heads, dim in shapes)
    query, key, value = (
        torch.randn(size, generator=draw, device="cpu", dtype=torch.float32).to(*kind) for size in sizes
    )
    return check_inputs(query, key, value, is_causal=s.is_causal)


def _through(points: Sequence[tuple[float, float]]) -> Line:
    """The line through two points, with nothing negative.

    Work that took no longer though there was more of it was disturbed: then it is taken as proportional.
    """
    (x, first), (y, second) = points
    if second <= first:
        return Line(0.0, min(first / x, second / y))
    slope = (second - first) / (y - x)
    return Line(0.0, second / y) if first < slope * x else Line(first - slope * x, slope)


@torch.no_grad()
def fastest(calls: Sequence[Callable[[], object]], device: torch.device) -> tuple[list[float], bool]:
    """Milliseconds of the fastest of each call's turns, after one that does not count; whether they came to an end."""
    for call in calls:
        call()
    best, calm, spent = [math.inf] * len(calls), 0, 0.0
    for turn in range(MOST_TURNS):
        times = [clock(call, device) for call in calls]
        better = any(time < (1 - CALM) * before for time, before in zip(times, best, strict=True))
        best = [min(pair) for pair in zip(times, best, strict=True)]
        calm, spent = 0 if better else calm + 1, spent + sum(times)
        if calm >= CALM_TURNS or (spent > ENOUGH and turn + 1 >= FEWEST_TURNS):
            break
    return best, calm >= CALM_TURNS
