"""Time and error of plans and of exact attention at each length.

They take turns, so that a machine that slows down slows all. Plans run even where `impl="auto"` would not run them.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median, quantiles
from time import perf_counter

import torch
from torch import Tensor
from torch.autograd import grad
from torch.nn.functional import scaled_dot_product_attention

from fewkeys.core.clock import clock
from fewkeys.core.inputs import Inputs
from fewkeys.core.metrics import output_error
from fewkeys.core.validation import check_inputs
from fewkeys.cost.crossover import exact_is_faster
from fewkeys.flow import attend
from fewkeys.plan import Plan

TURNS, FEWEST_TURNS, ENOUGH_SECONDS = 15, 3, 10.0
"""Turns of a length; and how many are enough after so many seconds."""
EXACT_PAIRS = 2**32
"""The most pairs of a query and a key over all heads: longer inputs have fewer."""

Draw = Callable[[int, int], tuple[Tensor, Tensor, Tensor, float]]
"""Query, key, value (1, H, N, D) and the scale, for N tokens and H heads."""


@dataclass(frozen=True)
class Timing:
    """One plan, or exact attention ("exact"), at one length.

    Attributes:
        heads: those that ran together.
        ms: median of a call, including gradients with `backward`.
        ratio, ratio_low, ratio_high: exact attention's time over this one's: median and quartiles.
        error: mean relative output error; None for random inputs.
        auto: what `impl="auto"` runs, "plan" or "exact".
    """

    name: str
    length: int
    heads: int
    ms: float
    ratio: float
    ratio_low: float
    ratio_high: float
    error: float | None
    auto: str


def bench(
    draw: Draw,
    plans: Mapping[str, Plan],
    lengths: Sequence[int],
    *,
    heads: int,
    real: bool,
    is_causal: bool = False,
    backward: bool = False,
    progress: Callable[[int, int, str], None] = lambda done, total, what: None,
) -> list[Timing]:
    """Time every plan at every length. `real`: measure errors, too."""
    rows: dict[str, Plan | None] = {"exact": None, **plans}
    total, timings = len(lengths) * TURNS, []
    for number, length in enumerate(lengths):
        query, key, value, scale = draw(length, max(1, min(heads, EXACT_PAIRS // length**2)))
        tensors = (x.requires_grad_(backward) for x in (query, key, value))
        inputs = check_inputs(*tensors, is_causal=is_causal, scale=scale)
        for plan in rows.values():  # warm up
            _milliseconds(inputs, plan, backward)
        times: dict[str, list[float]] = {name: [] for name in rows}
        start = perf_counter()
        for turn in range(TURNS):
            if turn >= FEWEST_TURNS and perf_counter() - start > ENOUGH_SECONDS:
                break
            for name, plan in rows.items():
                times[name].append(_milliseconds(inputs, plan, backward))
            progress(number * TURNS + turn + 1, total, f"{length} tokens")
        exact = _call(inputs, None).detach() if real else None
        timings += [_timing(name, plan, inputs, times, exact) for name, plan in rows.items()]
    progress(total, total, "done")
    return timings


def _call(x: Inputs, plan: Plan | None) -> Tensor:
    if plan is None:
        return scaled_dot_product_attention(
            x.query, x.key, x.value, is_causal=x.is_causal, scale=x.scale, enable_gqa=True
        )
    return attend(x.branch(), plan.never_exact())


def _milliseconds(x: Inputs, plan: Plan | None, backward: bool) -> float:
    """The time of one call; `backward`: with the gradients of query, key and value."""
    if backward:
        return clock(lambda: grad(_call(x, plan).sum(), (x.query, x.key, x.value)), x.query.device)
    with torch.no_grad():
        return clock(lambda: _call(x, plan), x.query.device)


@torch.no_grad()
def _timing(
    name: str, plan: Plan | None, x: Inputs, times: Mapping[str, Sequence[float]], exact: Tensor | None
) -> Timing:
    low, ratio, high = quantiles([a / b for a, b in zip(times["exact"], times[name], strict=True)], method="inclusive")
    error, auto = (None if exact is None else 0.0), "exact"
    if plan is not None:
        auto = "exact" if exact_is_faster(x, plan) else "plan"
        error = None if exact is None else output_error(_call(x, plan), exact)
    return Timing(name, x.keys, x.kv_heads, median(times[name]), ratio, low, high, error, auto)
