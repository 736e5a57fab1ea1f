"""The length up to which a stream runs exact attention, because it is faster for a token.

A token after n others takes `a + b n` by exact attention and `c + d n` by a scan. Both lines go through two short runs
on random inputs when a stream of such heads first answers a query, and are kept as in `fewkeys.cost.crossover`. If
numbers cannot be kept, counts of operations decide.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, astuple, dataclass
from functools import lru_cache

import torch
from torch import Tensor

from fewkeys.core.inputs import Inputs
from fewkeys.core.work import per_score
from fewkeys.cost.crossover import ADVANTAGE, SHIPPED, Line, fastest
from fewkeys.cost.kept import Numbers, kept
from fewkeys.native.build import identity
from fewkeys.native.tensors import DTYPES
from fewkeys.plan import Plan

LENGTHS = (1024, 8192)
NEVER = 2**62


@dataclass(frozen=True)
class Heads:
    """The facts that determine the lines, beside the plan and the machine."""

    device: str
    dtype: str
    query_heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    threads: int
    kernels: str

    def draw(self, length: int) -> Inputs:
        """Random inputs of `length` tokens, with the last token's query."""
        draw, dim = torch.Generator("cpu").manual_seed(0), self.head_dim
        shapes = ((self.query_heads, 1, dim), (self.kv_heads, length, dim), (self.kv_heads, length, self.value_dim))
        kind = (torch.device(self.device), getattr(torch, self.dtype.removeprefix("torch.")))
        query, key, value = (
            torch.randn((1, *shape), generator=draw, device="cpu", dtype=torch.float32).to(*kind) for shape in shapes
        )
        return Inputs(query, key, value, dim**-0.5, is_causal=True, offset=length - 1)


Token = Callable[[], object]
Tokens = Callable[[Plan, Inputs], tuple[Token, Token]]
"""Calls that process one more token after those of the inputs: by exact attention, and by the plan."""


def exact_length(plan: Plan, query: Tensor, key: Tensor, value: Tensor, tokens: Tokens) -> int:
    """The number of first tokens of a `KeyScan` stream with such heads that exact attention answers.

    0 without `exact_if_faster`. It does not depend on the number of tokens, so that outputs do not depend on the pieces
    in which tokens come.
    """
    if not plan.exact_if_faster:
        return 0
    kernels = identity() if query.device.type == "cpu" and query.dtype in DTYPES else "none"
    sizes = (query.shape[1], key.shape[1], key.shape[3], value.shape[3])
    return _length(plan, Heads(str(query.device), str(query.dtype), *sizes, torch.get_num_threads(), kernels), tokens)


@lru_cache(256)
def _length(plan: Plan, heads: Heads, tokens: Tokens) -> int:
    numbers = kept(asdict(heads) | {"decoding": plan.to_dict()}, lambda: _measured(plan, heads, tokens))
    if numbers is None:
        return crossing(*_by_operations(plan, heads), SHIPPED)
    return crossing(Line(*numbers[0]), Line(*numbers[1]), ADVANTAGE)


def crossing(of_exact: Line, of_plan: Line, share: float) -> int:
    """The number of keys from which the plan takes at most this share of exact attention's time."""
    gained = share * of_exact.slope - of_plan.slope
    behind = of_plan.fixed - share * of_exact.fixed
    return max(0, math.ceil(behind / gained)) if gained > 0 else NEVER


def through(points: Sequence[tuple[float, float]]) -> Line:
    """The line through two points, with nonnegative coefficients; the slope of a scan is nearly zero."""
    (x, first), (y, second) = points
    slope = max(0.0, (second - first) / (y - x))
    return Line(max(0.0, min(first, second) - slope * x), slope)


def _by_operations(plan: Plan, heads: Heads) -> tuple[Line, Line]:
    if plan.keep is None:
        raise ValueError("plan: expected one that chooses keys, got exact attention")
    points = []
    for length in LENGTHS:
        x = heads.draw(length)
        work = plan.keep.work(x) + plan.rest.work(x, plan.keep)
        points.append((float(length), work.scores * per_score(x) + work.scanned))
    return Line(0.0, per_score(x)), through(points)


def _measured(plan: Plan, heads: Heads, tokens: Tokens) -> tuple[Numbers, bool]:
    """The lines of exact attention and of the plan, and whether they are reliable."""
    by_exact, by_plan = zip(*(tokens(plan, heads.draw(length)) for length in LENGTHS), strict=True)
    times, calm = fastest([*by_exact, *by_plan], torch.device(heads.device))
    pairs = [list(zip(map(float, LENGTHS), part, strict=True)) for part in (times[:2], times[2:])]
    return tuple(astuple(through(pair)) for pair in pairs), calm
