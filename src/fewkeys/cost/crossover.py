"""The choice between a plan and exact attention, by linear models of their times on this machine.

For a sequence, with all heads of a layer, exact attention takes `a + b * pairs` of queries and keys. A plan takes
`c + d * keys` to prepare and `e + f * queries` to attend, where queries that scan all keys count for more. With
gradients, lines include the backward pass.

Each line goes through two runs on random inputs, near the length where the plan begins to pay. The runs take turns, so
that other load disturbs all of them, and the fastest of each counts. `impl="auto"` measures lines when it first needs
them, on a CPU in some tenths of a second, and keeps them (`fewkeys.cost.kept`). Lines of times that did not settle, or
fell with more work, expire soon. Where none can be kept, counts of operations decide (`fewkeys.cost.operations`).
"""

import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import lru_cache, partial
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from fewkeys.core.clock import Watch, clock
from fewkeys.core.extent import rescaled
from fewkeys.core.inputs import Inputs
from fewkeys.core.precision import full_precision
from fewkeys.core.validation import check_inputs
from fewkeys.cost.kept import Numbers, kept
from fewkeys.cost.operations import answered_queries, exact_operations, plan_operations, scan_share, visible_keys
from fewkeys.execute import dispatch, exact, problem
from fewkeys.execute.native import recorded
from fewkeys.native.build import identity
from fewkeys.native.tensors import is_trained
from fewkeys.plan import Plan

ADVANTAGE, SHIPPED = 0.9, 0.3
"""The plan runs if it is expected to take this share of exact attention's time, or of its operations, where nothing was
measured, or less. Lines have errors, and plans' operations come in smaller pieces.
"""
SHORTEST, LONGEST, ON_GPU = 512, 2048, 8192
"""The range of the length at which lines are measured: exact attention up to it, plans up to twice it. Shorter inputs
take a GPU as long as it takes to start operations.
"""
REACH = 128
"""Of the biases of distances that are measured, as in T5 and MPNet."""
CALM, CALM_TURNS = 0.03, 3
"""Turns end once so many of them in a row lowered no time by more than `CALM`."""
ENOUGH = 2000.0
"""Milliseconds after which they end in any case, if there were enough to see that."""

Call = Callable[[], object]
Point = tuple[float, float]
"""Units of work and the milliseconds that they took."""


class Line(NamedTuple):
    """Milliseconds: `fixed + slope * units`."""

    fixed: float
    slope: float

    def at(self, units: float) -> float:
        return self.fixed + self.slope * units


@dataclass(frozen=True)
class Setting:
    """What the lines depend on, beside the plan and the machine."""

    device: torch.device
    dtype: torch.dtype
    query_heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    threads: int
    kernels: str
    is_causal: bool = False
    is_biased: bool = False
    has_gradients: bool = False

    @classmethod
    def of(cls, query: Tensor, key: Tensor, value: Tensor, *, is_causal: bool, is_biased: bool = False) -> Self:
        kernels = identity() if query.device.type == "cpu" and query.dtype != torch.float64 else "none"
        facts = (query.shape[1], key.shape[1], key.shape[3], value.shape[3], torch.get_num_threads(), kernels)
        return cls(query.device, query.dtype, *facts, is_causal, is_biased, is_trained(query, key, value))

    def facts(self) -> dict[str, Any]:
        device = torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else str(self.device)
        return asdict(self) | {"device": device, "dtype": str(self.dtype)}

    def draw(self, length: int, *, queries: int | None = None) -> Inputs:
        """Random inputs of `length` tokens, of which the last `queries` have queries."""
        generator = torch.Generator("cpu").manual_seed(0)
        queries = length if queries is None else queries
        of_keys = ((1, self.kv_heads, length, dim) for dim in (self.head_dim, self.value_dim))
        shapes = ((1, self.query_heads, queries, self.head_dim), *of_keys)
        rows = (torch.randn(shape, generator=generator, device="cpu", dtype=torch.float32) for shape in shapes)
        query, key, value = (tensor.to(self.device, self.dtype).requires_grad_(self.has_gradients) for tensor in rows)
        bias = query.new_zeros((self.query_heads, 2 * REACH + 1), dtype=torch.float32) if self.is_biased else None
        offset = length - queries
        return check_inputs(query, key, value, is_causal=self.is_causal, query_offset=offset, distance_bias=bias)


class Expected(NamedTuple):
    """Expected milliseconds."""

    exact: float
    plan: float


def exact_is_faster(inputs: Inputs, plan: Plan) -> bool:
    """Whether exact attention is not clearly slower than the plan, assumed where `goes_by_block`. Reads no data."""
    if goes_by_block(inputs, plan):
        return True
    times = expected(inputs, plan)
    if times is None:
        return plan_operations(inputs, plan) > SHIPPED * exact_operations(inputs)
    return times.plan > ADVANTAGE * times.exact


def goes_by_block(inputs: Inputs, plan: Plan) -> bool:
    """Whether the plan runs block by block on a GPU, in many operations of torch."""
    return inputs.query.device.type != "cpu" and (plan.rest.needs_causal or scan_share(inputs, plan) > 0)


def expected(inputs: Inputs, plan: Plan) -> Expected | None:
    """None if no lines can be kept, and for a plan with more arithmetic than exact attention."""
    x = inputs
    if plan_operations(x, plan) >= exact_operations(x):
        return None
    setting = Setting.of(x.query, x.key, x.value, is_causal=x.is_causal, is_biased=x.bias is not None)
    lines = _lines(setting, plan)
    if lines is None:
        return None
    exact_line, prepare, attend = lines
    pairs, rows = (x.query_heads * count for count in (x.queries * visible_keys(x), answered_queries(x, plan)))
    keys, rows = x.kv_heads * x.keys, rows * (1 + scan_share(x, plan))
    return Expected(x.batch * exact_line.at(pairs), x.batch * (prepare.at(keys) + attend.at(rows)))


@lru_cache(256)
def _lines(setting: Setting, plan: Plan) -> tuple[Line, ...] | None:
    """The lines of exact attention, of preparing and of attending; None where the folder for them cannot be written."""

    def measure() -> tuple[Numbers, bool]:
        with ThreadPoolExecutor(1) as thread:  # without the caller's modes and hooks, such as those of checkpoints
            return thread.submit(_measured, setting, plan).result()

    numbers = kept(setting.facts() | {"plan": plan.to_dict()}, measure)
    return None if numbers is None else tuple(Line(*row) for row in numbers)


@full_precision()
def _measured(setting: Setting, plan: Plan) -> tuple[Numbers, bool]:
    """The lines, and whether they are reliable."""
    pairs, calm = timed_pairs(_points(setting, plan), setting)
    is_sound = calm and all(few[1] < many[1] for few, many in pairs)
    exact_pair, calls, attend = pairs
    prepare = [(keys, max(0.0, ms - of_it)) for (keys, ms), (_, of_it) in zip(calls, attend, strict=True)]
    return tuple(map(through, (exact_pair, prepare, attend))), is_sound


def _points(setting: Setting, plan: Plan) -> list[tuple[float, Call]]:
    """Units of work and calls that do them, two of each kind: exact attention, the plan, and its attending alone."""

    def by_plan(x: Inputs) -> Tensor:
        x, restore = rescaled(x.branch())  # it has no statistics yet
        return restore(recorded.attend(x, plan))

    exactly = partial(exact.attend, weights=plan.weights)

    def passed(attend: Callable[[Inputs], Tensor], x: Inputs) -> None:
        with torch.set_grad_enabled(setting.has_gradients):
            output = attend(x)
            if setting.has_gradients:
                torch.autograd.grad(output.sum(), (x.query, x.key, x.value))

    # The power of two from which the plan is expected to be faster, by counts of operations.
    crossing = SHORTEST if setting.device.type == "cpu" else ON_GPU
    while crossing < LONGEST and plan_operations(x := setting.draw(crossing), plan) > SHIPPED * exact_operations(x):
        crossing *= 2
    half, once, twice = (setting.draw(length) for length in (crossing // 2, crossing, 2 * crossing))
    pairs = ((x.query_heads * x.keys * visible_keys(x), partial(passed, exactly, x)) for x in (half, once))
    keys = ((x.kv_heads * x.keys, partial(passed, by_plan, x)) for x in (once, twice))
    problems = ((x, problem.prepare(rescaled(x.branch())[0], plan)) for x in (once, twice))
    queries = ((x.query_heads * x.keys * (1 + scan_share(x, plan)), partial(dispatch.attend, p)) for x, p in problems)
    return [*pairs, *keys, *queries]


def timed_pairs(points: Sequence[tuple[float, Call]], setting: Setting) -> tuple[list[tuple[Point, Point]], bool]:
    """Units and fastest times, two by two, and whether the times are undisturbed."""
    times, calm = fastest([call for _, call in points], setting.device)
    timed = [(units, ms) for (units, _), ms in zip(points, times, strict=True)]
    return list(zip(timed[::2], timed[1::2], strict=True)), calm


def through(points: Sequence[Point]) -> Line:
    """The line through two points, with nonnegative coefficients."""
    (x, first), (y, second) = points
    slope = max(0.0, (second - first) / (y - x))
    fixed = min(first, second) - slope * x
    return Line(fixed, slope) if fixed > 0 else Line(0.0, second / y)


@torch.no_grad()
def fastest(calls: Sequence[Call], device: torch.device) -> tuple[list[float], bool]:
    """Each call's fastest time in ms, after one to warm up; and whether times settled while no other program ran."""
    for call in calls:
        call()
    watch = Watch()
    best, turns, calm, spent = [math.inf] * len(calls), 0, 0, 0.0
    while calm < CALM_TURNS and (turns <= CALM_TURNS or spent <= ENOUGH):
        times = [clock(call, device) for call in calls]
        better = any(time < (1 - CALM) * before for time, before in zip(times, best, strict=True))
        best = [min(pair) for pair in zip(times, best, strict=True)]
        turns, calm, spent = turns + 1, 0 if better else calm + 1, spent + sum(times)
    return best, calm >= CALM_TURNS and not watch.is_disturbed
