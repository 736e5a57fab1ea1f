"""Which of a plan and exact attention is the faster here: straight lines, measured once for this machine and kept.

Exact attention takes `a + b` times the pairs of queries and keys; a plan takes `c + d` times the keys to prepare and
`e + f` times the queries to attend. Each line goes through two short runs on random inputs, made when `impl="auto"`
first asks about a plan: some tenths of a second, once for every plan, device, dtype, head size and number of threads of
a machine and version (`fewkeys.cost.kept`). Which is faster is a function of the numbers that are kept, so that the
same call goes the same way in every process. The plan is taken where its line is clearly below. Where nothing can be
kept, nothing is measured either: operations decide, counted by `fewkeys.cost.operations`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, astuple, dataclass
from functools import lru_cache, partial

import torch

from fewkeys.core.clock import clock
from fewkeys.core.inputs import Inputs
from fewkeys.core.learned import learned_parts
from fewkeys.core.validation import check_inputs
from fewkeys.core.weights import Weights
from fewkeys.cost.kept import kept
from fewkeys.cost.operations import exact_operations, plan_operations
from fewkeys.execute import dispatch, exact
from fewkeys.execute.problem import Problem
from fewkeys.native.build import identity
from fewkeys.plan import Plan

ADVANTAGE = 0.85
"""The plan is taken where it is expected to need at most this share of exact attention's time: lines are not exact."""
SHIPPED = 0.3
"""Where nothing is measured, the plan is taken where it has at most this share of exact attention's operations: a
cautious one, since plans do theirs in smaller pieces."""
EXACT_LENGTHS, PLAN_LENGTHS = (256, 1024), (2048, 4096)
HEADS, TURNS = 2, 3
MOST_TURNS, PATIENCE = 20, 30.0
"""Short calls, which any disturbance decides, are repeated: for so many milliseconds, but no more often than that."""


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
    """Milliseconds that exact attention and the plan are expected to take."""

    exact: float
    plan: float

    @property
    def exact_is_faster(self) -> bool:
        return self.plan > ADVANTAGE * self.exact


def exact_is_faster(inputs: Inputs, plan: Plan) -> bool:
    """Whether exact attention is not clearly slower than the plan. Reads no data."""
    own, exact_ones = plan_operations(inputs, plan), exact_operations(inputs)
    # Where the plan has more arithmetic there is nothing to measure.
    if own >= exact_ones:
        return True
    found = expected(inputs, plan)
    return own > SHIPPED * exact_ones if found is None else found.exact_is_faster


def expected(inputs: Inputs, plan: Plan) -> Expected | None:
    """The time that both would take on inputs of this size, by this machine's lines; None where none can be kept."""
    x = inputs
    # Learned plans are of all heads of a layer; of others some heads tell as much.
    heads = x.kv_heads if any(learned_parts(plan)) else min(HEADS, x.kv_heads)
    setting = Setting(
        *(str(x.query.device), str(x.query.dtype), x.head_dim, x.value_dim, x.is_causal, heads, x.gqa_ratio),
        *(torch.get_num_threads(), identity()),
    )
    lines = _lines(setting, plan)
    if lines is None:
        return None
    exact_line, prepare, attend = lines
    rows = x.batch * x.query_heads * x.queries
    seen = x.keys * (0.5 if x.is_causal and not x.offset else 1.0)
    return Expected(exact_line.at(rows * seen), prepare.at(x.batch * x.kv_heads * x.keys) + attend.at(rows))


@lru_cache(256)
def _lines(setting: Setting, plan: Plan) -> tuple[Line, Line, Line] | None:
    """Those of exact attention, of preparing and of attending, as they are kept."""
    told = asdict(setting)
    if setting.device.startswith("cuda"):
        told["device"] = torch.cuda.get_device_name(setting.device)
    weights = str(plan.weights)
    exact_line = kept(told | {"exact": weights}, lambda: (astuple(_exact_line(setting, plan.weights)),))
    if exact_line is None:
        return None
    found = kept(told | {"plan": plan.to_dict()}, lambda: tuple(astuple(line) for line in _plan_lines(setting, plan)))
    return None if found is None else (Line(*exact_line[0]), Line(*found[0]), Line(*found[1]))


def _exact_line(setting: Setting, weights: Weights) -> Line:
    points = []
    for length in EXACT_LENGTHS:
        x = _inputs(setting, length)
        pairs = x.query_heads * length**2 * (0.5 if x.is_causal else 1.0)
        points.append((pairs, _best(partial(exact.attend, x, weights), x.query.device)))
    return _through(points)


def _plan_lines(setting: Setting, plan: Plan) -> tuple[Line, Line]:
    prepare, attend = [], []
    keep = plan.keep
    if keep is None:
        raise ValueError("plan: expected one that chooses keys, got exact attention")
    for length in PLAN_LENGTHS:
        x = _inputs(setting, length)

        def ready(x: Inputs = x) -> Problem:
            own = x.branch()  # which remembers nothing yet
            graph = keep.select(own)
            return Problem(own, graph, plan.rest.prepare(own, graph, plan.weights), plan.weights)

        answer = partial(dispatch.attend, ready())
        prepare.append((float(x.kv_heads * length), _best(ready, x.query.device)))
        attend.append((float(x.query_heads * length), _best(answer, x.query.device)))
    return _through(prepare), _through(attend)


def _inputs(setting: Setting, length: int) -> Inputs:
    s, draw = setting, torch.Generator("cpu").manual_seed(0)
    shapes = ((s.heads * s.gqa_ratio, s.head_dim), (s.heads, s.head_dim), (s.heads, s.value_dim))
    kind = (torch.device(s.device), getattr(torch, s.dtype.removeprefix("torch.")))
    sizes = ((1, heads, length, dim) for heads, dim in shapes)
    query, key, value = (
        torch.randn(size, generator=draw, device="cpu", dtype=torch.float32).to(*kind) for size in sizes
    )
    return check_inputs(query, key, value, is_causal=s.is_causal)


def _through(points: list[tuple[float, float]]) -> Line:
    """The line through two points, with nothing negative.

    Work that took no longer though there was more of it was disturbed: then it is taken as proportional.
    """
    (x, first), (y, second) = points
    if second <= first:
        return Line(0.0, min(first / x, second / y))
    slope = (second - first) / (y - x)
    return Line(0.0, second / y) if first < slope * x else Line(first - slope * x, slope)


@torch.no_grad()
def _best(call: Callable[[], object], device: torch.device) -> float:
    """Milliseconds of the fastest of some calls, after one that does not count."""
    times: list[float] = []
    while len(times) <= TURNS or (sum(times[1:]) < PATIENCE and len(times) <= MOST_TURNS):
        times.append(clock(call, device))
    return min(times[1:])
