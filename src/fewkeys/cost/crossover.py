"""Which of a plan and exact attention is the faster here: two straight lines, measured on this machine.

Exact attention takes `a + b` times the pairs of queries and keys; a plan takes `c + d` times the keys to prepare and
`e + f` times the queries to attend. Each line goes through two short runs on random inputs, made when `impl="auto"`
first asks about a plan: some tenths of a second, once for every plan, device, dtype, head size and number of threads of
a process. The plan is taken where its line is clearly below.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from time import perf_counter

import torch
from torch.nn.functional import scaled_dot_product_attention

from fewkeys.core.graph import Graph
from fewkeys.core.inputs import Inputs
from fewkeys.core.learned import learned_parts
from fewkeys.core.validation import check_inputs
from fewkeys.cost.operations import exact_operations, plan_operations
from fewkeys.execute.torch import attend as linear
from fewkeys.plan import Plan
from fewkeys.rest.base import BlockStandIns, StandIns
from fewkeys.select.base import Selector

ADVANTAGE = 0.85
"""The plan is taken where it is expected to need at most this share of exact attention's time: lines are not exact."""
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
    """What the lines depend on, beside the plan."""

    device: torch.device
    dtype: torch.dtype
    head_dim: int
    value_dim: int
    is_causal: bool
    heads: int
    groups: int
    threads: int


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
    # Where the plan has more arithmetic there is nothing to measure.
    if plan_operations(inputs, plan) >= exact_operations(inputs):
        return True
    return expected(inputs, plan).exact_is_faster


def expected(inputs: Inputs, plan: Plan) -> Expected:
    """The time that both would take on inputs of this size, by the lines of this machine."""
    x = inputs
    # Learned plans are of all heads of a layer; of others some heads tell as much.
    heads = x.kv_heads if any(learned_parts(plan)) else min(HEADS, x.kv_heads)
    groups = x.groups if any(learned_parts(plan)) else 1
    setting = Setting(
        x.query.device, x.query.dtype, x.head_dim, x.value_dim, x.is_causal, heads, groups, torch.get_num_threads()
    )
    exact, (prepare, attend) = _exact_line(setting), _plan_lines(setting, plan)
    rows = x.batch * x.query_heads * x.queries
    seen = x.keys * (0.5 if x.is_causal and not x.offset else 1.0)
    return Expected(exact.at(rows * seen), prepare.at(x.batch * x.kv_heads * x.keys) + attend.at(rows))


@lru_cache
def _exact_line(setting: Setting) -> Line:
    points = []
    for length in EXACT_LENGTHS:
        x = _inputs(setting, length)
        key, value = (rows.repeat_interleave(x.groups, 1) for rows in (x.key, x.value))

        def call(x: Inputs = x, key: torch.Tensor = key, value: torch.Tensor = value) -> None:
            scaled_dot_product_attention(x.query, key, value, is_causal=x.is_causal)

        pairs = x.query_heads * length**2 * (0.5 if x.is_causal else 1.0)
        points.append((pairs, _best(call, x.query.device)))
    return _through(points)


@lru_cache
def _plan_lines(setting: Setting, plan: Plan) -> tuple[Line, Line]:
    prepare, attend = [], []
    for length in PLAN_LENGTHS:
        x = _inputs(setting, length)
        keep = plan.keep
        if keep is None:
            raise ValueError("plan: expected one that chooses keys, got exact attention")

        def ready(x: Inputs = x, keep: Selector = keep) -> tuple[Graph, StandIns | BlockStandIns | None]:
            own = x.branch()  # which remembers nothing yet
            graph = keep.select(own)
            return graph, plan.rest.prepare(own, graph, plan.weights)

        graph, stand_ins = ready()

        def answer(x: Inputs = x, graph: Graph = graph, stand_ins: StandIns | BlockStandIns | None = stand_ins) -> None:
            linear.attend(x, graph, stand_ins, plan.weights)

        prepare.append((float(x.kv_heads * length), _best(ready, x.query.device)))
        attend.append((float(x.query_heads * length), _best(answer, x.query.device)))
    return _through(prepare), _through(attend)


def _inputs(setting: Setting, length: int) -> Inputs:
    s, draw = setting, torch.Generator().manual_seed(0)
    shapes = ((s.heads * s.groups, s.head_dim), (s.heads, s.head_dim), (s.heads, s.value_dim))
    tensors = [torch.randn(1, heads, length, dim, generator=draw).to(s.device, s.dtype) for heads, dim in shapes]
    return check_inputs(tensors[0], tensors[1], tensors[2], is_causal=s.is_causal)


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
        start = perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(1e3 * (perf_counter() - start))
    return min(times[1:])
