"""Time, memory and error of plans against exact attention, side by side, length by length.

At every length exact attention and the plans take turns. Figures are medians over the turns, and a ratio is the median
of the ratios turn by turn, so that a machine that slows down slows both. The plans always run; `auto` says whether
`impl="auto"` would have run them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from statistics import median, quantiles
from time import perf_counter
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from fewkeys.bench.peak import PeakMemory
from fewkeys.core.clock import clock, now
from fewkeys.core.impl import Impl
from fewkeys.core.inputs import Inputs
from fewkeys.core.metrics import output_error
from fewkeys.core.validation import check_inputs
from fewkeys.cost.crossover import exact_is_faster
from fewkeys.cost.operations import plan_operations, visible_keys
from fewkeys.execute import dispatch
from fewkeys.execute.problem import Problem
from fewkeys.flow import attend
from fewkeys.plan import Plan
from fewkeys.rest.base import BlockStandIns

TURNS, FEWEST_TURNS, ENOUGH_SECONDS = 15, 3, 10.0
"""A length takes `TURNS` turns, or at least `FEWEST_TURNS` if they take longer than `ENOUGH_SECONDS`."""
EXACT_PAIRS = 2**32
"""The most pairs of a query and a key that exact attention runs: longer inputs take fewer heads."""

Draw = Callable[[int, int], tuple[Tensor, Tensor, Tensor, float]]
"""Query, key, value (1, H, N, D) and the scale, for N tokens and H heads."""


@dataclass(frozen=True)
class Timing:
    """One plan, or exact attention, at one length. Milliseconds, bytes.

    Attributes:
        name: of the plan; "exact" is exact attention.
        length, heads: tokens, and heads that ran together.
        ms, ms_low, ms_high: median and quartiles of a call; with `backward`, of a call and its gradients.
        ratio, ratio_low, ratio_high: exact attention's time over this one's, turn by turn: median and quartiles.
        select_ms, prepare_ms, attend_ms: choosing keys, making stand-ins and attending alone (forward only).
        peak_bytes: peak memory of the tensors beyond the inputs; None for exact attention.
        tensor_bytes: of query, key, value and output together.
        floor_ms: the time of the plan's (or exact attention's) arithmetic and bytes at the machine's measured rates.
        error: mean relative output error; None where the inputs are random.
        auto: "plan" or "exact", what `impl="auto"` runs.
    """

    name: str
    length: int
    heads: int
    ms: float
    ms_low: float
    ms_high: float
    ratio: float
    ratio_low: float
    ratio_high: float
    select_ms: float | None
    prepare_ms: float | None
    attend_ms: float | None
    peak_bytes: int | None
    tensor_bytes: int
    floor_ms: float
    error: float | None
    auto: str


@dataclass(frozen=True)
class Rates:
    """The speed of the machine: `bytes_per_ms` copied, `operations_per_ms` in matrix products (2 per multiply-add)."""

    bytes_per_ms: float
    operations_per_ms: float


def bench(
    draw: Draw,
    plans: Mapping[str, Plan],
    lengths: Sequence[int],
    *,
    heads: int,
    real: bool,
    is_causal: bool = False,
    backward: bool = False,
    impl: Impl = "auto",
    progress: Callable[[int, int, str], None] | None = None,
) -> tuple[list[Timing], Rates]:
    """Time every plan at every length, by the executor `impl`. `real`: whether to measure errors (captured inputs).

    Long inputs, on which exact attention would take minutes, get fewer heads (`EXACT_PAIRS`), see `Timing.heads`.
    """
    sizes = [max(1, min(heads, EXACT_PAIRS // length**2)) for length in lengths]
    query, key, value, _ = draw(min(lengths), heads)
    rates = measure_rates(query.device, query.dtype)
    timings = []
    for number, (length, count) in enumerate(zip(lengths, sizes, strict=True)):
        query, key, value, scale = draw(length, count)
        tensors = [x.requires_grad_(backward) for x in (query, key, value)]
        inputs = check_inputs(*tensors, is_causal=is_causal, scale=scale, impl=impl)

        def call(plan: Plan | None, inputs: Inputs = inputs) -> Tensor:
            x = inputs
            if plan is None:
                return scaled_dot_product_attention(x.query, x.key, x.value, is_causal=x.is_causal, scale=x.scale)
            return attend(x.branch(), plan.never_exact())

        def say(turn: int, number: int = number, length: int = length) -> None:
            if progress is not None:
                progress(number * TURNS + turn, len(lengths) * TURNS, f"{length} tokens")

        times = _turns(call, plans, tensors, backward, say)
        truth = call(None).detach() if real else None
        for name, plan in {"exact": None, **plans}.items():
            timings.append(_timing(name, plan, inputs, times, truth, call, rates, backward))
    if progress is not None:
        progress(len(lengths) * TURNS, len(lengths) * TURNS, "done")
    return timings, rates


def growth(rows: Sequence[Timing], name: str, start: int = 4096) -> float | None:
    """The exponent with which a plan's time per head grows from `start` tokens to the last length.

    If fewer than two lengths are that long, it starts at the first.
    """
    timings = sorted((row for row in rows if row.name == name), key=lambda row: row.length)
    late = [row for row in timings if row.length >= start]
    timings = late if len(late) > 1 else timings
    if len(timings) < 2:
        return None
    first, last = timings[0], timings[-1]
    return math.log(last.ms / last.heads * first.heads / first.ms) / math.log(last.length / first.length)


def as_dict(row: Timing) -> dict[str, Any]:
    """The row as JSON values, times to the microsecond."""
    return {name: round(item, 6) if isinstance(item, float) else item for name, item in asdict(row).items()}


def measure_rates(device: torch.device, dtype: torch.dtype) -> Rates:
    """The best of several copies of 256 MB and of products of 2048 x 2048 matrices."""
    big = torch.ones(2**26, device=device)
    into = torch.empty_like(big)
    square = torch.ones((2048, 2048), device=device, dtype=dtype)
    copy = min(clock(lambda: into.copy_(big), device) for _ in range(5))
    product = min(clock(lambda: square @ square, device) for _ in range(5))
    return Rates(2 * big.numel() * big.element_size() / copy, 2 * 2048**3 / product)


def _turns(
    call: Callable[[Plan | None], Tensor],
    plans: Mapping[str, Plan],
    tensors: Sequence[Tensor],
    backward: bool,
    say: Callable[[int], None],
) -> dict[str, list[float]]:
    device = tensors[0].device

    def once(plan: Plan | None) -> float:
        if not backward:
            with torch.no_grad():
                return clock(lambda: call(plan), device)
        for x in tensors:
            x.grad = None
        return clock(lambda: call(plan).sum().backward(), device)

    rows: dict[str, Plan | None] = {"exact": None, **plans}
    for plan in rows.values():
        once(plan)
    times: dict[str, list[float]] = {name: [] for name in rows}
    start = perf_counter()
    for turn in range(TURNS):
        if turn >= FEWEST_TURNS and perf_counter() - start > ENOUGH_SECONDS:
            break
        for name, plan in rows.items():
            times[name].append(once(plan))
        say(turn + 1)
    return times


def _timing(
    name: str,
    plan: Plan | None,
    inputs: Inputs,
    times: Mapping[str, Sequence[float]],
    truth: Tensor | None,
    call: Callable[[Plan | None], Tensor],
    rates: Rates,
    backward: bool,
) -> Timing:
    x = inputs
    low, middle, high = _quartiles(times[name])
    ratios = _quartiles([a / b for a, b in zip(times["exact"], times[name], strict=True)])
    size = x.query.element_size()
    tensor_bytes = size * x.batch * (x.query_heads * x.queries + x.kv_heads * x.keys) * (x.head_dim + x.value_dim)
    pairs = x.batch * x.query_heads * x.queries
    work = 2.0 * visible_keys(x) * (x.head_dim + x.value_dim)
    parts: tuple[float, ...] = ()
    error = peak = None
    if plan is not None:
        work = plan_operations(x, plan)
        with torch.no_grad():
            parts = _parts(x, plan)
            with PeakMemory() as memory:
                output = call(plan)
            peak = memory.peak
        error = None if truth is None else output_error(output, truth)
    select, prepare, attend = parts or (None, None, None)
    passes = 3.5 if backward else 1.0  # the gradient of a matrix product is two products, and scores are formed again
    floor = max(tensor_bytes / rates.bytes_per_ms, passes * work * pairs / rates.operations_per_ms)
    return Timing(
        name,
        x.keys,
        x.kv_heads,
        middle,
        low,
        high,
        ratios[1],
        ratios[0],
        ratios[2],
        select,
        prepare,
        attend,
        peak,
        tensor_bytes,
        floor,
        error if plan is not None else None if truth is None else 0.0,
        "exact" if plan is None or exact_is_faster(x, plan) else "plan",
    )


def _parts(inputs: Inputs, plan: Plan) -> tuple[float, float, float]:
    """Milliseconds of selecting, preparing and attending: medians of five."""
    device, rows = inputs.query.device, []
    if plan.keep is None:
        return 0.0, 0.0, clock(lambda: attend(inputs, plan), device)
    for _ in range(5):
        x, marks = inputs.branch(), [now(device)]
        graph = plan.keep.select(x)
        marks.append(now(device))
        stand_ins = plan.rest.prepare(x, graph, plan.weights)
        if isinstance(stand_ins, BlockStandIns):
            _ = stand_ins.states  # computed lazily: otherwise while attending
        marks.append(now(device))
        dispatch.attend(Problem(x, graph, stand_ins, plan.weights))
        marks.append(now(device))
        rows.append([b - a for a, b in pairwise(marks)])
    select, prepare, attend = (median(column) for column in zip(*rows, strict=True))
    return select, prepare, attend


def _quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    if len(values) < 2:
        return values[0], values[0], values[0]
    low, middle, high = quantiles(values, n=4, method="inclusive")
    return low, middle, high
