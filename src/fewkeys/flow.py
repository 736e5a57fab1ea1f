"""The whole flow on one screen: who answers a call, the call in safe units and places, keys chosen, others summarised.

    choose        exact attention or the plan, and why; reads no data
    canonicalise  the problem as plans are written for it: parts that need neither other units nor other places
    prepare       the keys that are kept, and what stands in for the others
    run           the output of a choice

`attention`, `explain`, checks of a plan's error and comparisons go this way, each as far as it needs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Unpack

import torch
from torch import Tensor

from fewkeys import native
from fewkeys.core.derivatives import constants
from fewkeys.core.extent import rescaled
from fewkeys.core.gaps import has_gaps, has_interior_padding, without_gaps
from fewkeys.core.graph import Graph
from fewkeys.core.impl import Impl
from fewkeys.core.inputs import Inputs
from fewkeys.core.precision import full_precision
from fewkeys.core.validation import Options, Rows, check_inputs, unknown_option
from fewkeys.cost.crossover import exact_is_faster
from fewkeys.execute import dispatch, exact
from fewkeys.execute.problem import Problem
from fewkeys.guard.fallback import Guard
from fewkeys.plan import Plan


@dataclass(frozen=True, eq=False)
class Choice:
    """Who answers `inputs`: exact attention, or `plan`; and the reason."""

    inputs: Inputs
    plan: Plan
    is_exact: bool
    reason: str


FASTER = "by what is expected to be faster"
"""The reason of a choice by cost, of which `fewkeys.cost.crossover` knows the numbers."""


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    plan: Plan | Sequence[Plan],
    max_error: float | Guard | None = None,
    **options: Unpack[Options],
) -> Tensor:
    """`fewkeys.attention` of a plan, or of one plan for each key head; `options` are those of `check_inputs`."""
    inputs = checked(query, key, value, plan, **options)
    guard = max_error if isinstance(max_error, Guard | None) else Guard(max_error)
    if guard is not None:
        guard.count_call()
    return attend(inputs, plan, guard)


def checked(
    query: Tensor, key: Tensor, value: Tensor, plan: Plan | Sequence[Plan] = (), **options: Unpack[Options]
) -> Inputs:
    """The problem that a call poses, `ValueError` or `TypeError` where it poses none; padding is as it came.

    A plan of cohorts reads rows here and there: those of a head are put side by side if it will answer. Models have
    those of all heads of a token side by side.
    """
    for name in options.keys() - Options.__annotations__.keys():
        raise unknown_option(name)
    plans = (plan,) if isinstance(plan, Plan) else plan
    scattered = any(one.keep is not None and one.keep.cohort_lists > 1 for one in plans)
    how = options.get("is_causal", False), options.get("query_offset", 0), options.get("impl", "auto")

    def look(query: Tensor, key: Tensor, value: Tensor) -> tuple[list[float], Rows]:
        rows = query, key, value
        if scattered and not gives_way(plan, rows, *how):
            return native.by_head(*rows)
        return native.largest(*rows), rows

    return check_inputs(query, key, value, look=look, clear=False, **options)


def attend(inputs: Inputs, plan: Plan | Sequence[Plan], guard: Guard | None = None) -> Tensor:
    """The output of a plan, or of one plan for each key head; corrected by the guard, if any."""
    parts = [(run(choose(one, part, guard), guard), heads) for one, heads, part in by_plan(inputs, plan)]
    if len(parts) == 1:
        return parts[0][0]
    output = torch.cat([out.unflatten(1, (-1, inputs.gqa_ratio)) for out, _ in parts], 1)
    order = torch.cat([heads for _, heads in parts]).argsort()
    return output[:, order].flatten(1, 2)


def choose(plan: Plan, inputs: Inputs, guard: Guard | None = None) -> Choice:
    """Who answers, whatever the data. Raises `ValueError` where the plan has no meaning for such inputs."""
    plan.check(inputs)
    if plan.keep is None:
        return Choice(inputs, plan, True, "the plan keeps every key")
    if guard is not None and inputs.queries <= guard.queries:
        return Choice(inputs, plan, True, "the check of so few queries is their answer")
    # `"reference"` runs every plan as it is defined, and only `"auto"` may prefer what is faster.
    if inputs.impl == "reference":
        return Choice(inputs, plan, False, "the reference runs every plan as it is defined")
    if plan.keep.covers(inputs):
        return Choice(inputs, plan, True, "the plan's keys are all there are")
    if not plan.exact_if_faster:
        return Choice(inputs, plan, False, "it does not say exact_if_faster")
    if inputs.impl != "auto":
        return Choice(inputs, plan, False, 'impl="auto" alone looks for what is faster')
    return Choice(inputs, plan, exact_is_faster(inputs, plan), FASTER)


def gives_way(
    plan: Plan | Sequence[Plan], rows: tuple[Tensor, Tensor, Tensor], is_causal: bool, offset: int, impl: Impl
) -> bool:
    """Whether `choose` lets exact attention answer all heads of a call with such queries, keys and values.

    It reads no data and decides once for each shape, so that a short input costs little more than without a plan.
    """
    if torch.compiler.is_compiling():
        return False
    query, key, value = rows
    plans = (plan,) if isinstance(plan, Plan) else tuple(plan)
    how = (query.dtype, query.device, is_causal, offset, impl, torch.get_num_threads())
    return _gives_way(plans, query.shape, key.shape, value.shape, *how)


@lru_cache(4096)
def _gives_way(
    plans: tuple[Plan, ...],
    query: torch.Size,
    key: torch.Size,
    value: torch.Size,
    dtype: torch.dtype,
    device: torch.device,
    is_causal: bool,
    offset: int,
    impl: Impl,
    threads: int,  # which `exact_is_faster` asks torch for
) -> bool:
    if impl != "auto" or not any(one.exact_if_faster for one in plans):
        return False
    nothing = torch.zeros((), dtype=dtype, device=device)
    empty_query, empty_key, empty_value = (nothing.expand(shape) for shape in (query, key, value))
    inputs = Inputs(empty_query, empty_key, empty_value, 1.0, is_causal, offset)
    return all(choose(one, part).is_exact for one, _, part in by_plan(inputs, plans))


@full_precision()
def run(choice: Choice, guard: Guard | None = None) -> Tensor:
    """The output (B, Hq, Nq, Dv) of a choice; corrected by the guard, if any."""
    if choice.is_exact:
        return exact.attend(choice.inputs, choice.plan.weights)
    parts, restore = canonicalise(choice)
    outputs = []
    for part in parts:
        problem = prepare(part, choice.plan)
        output = dispatch.attend(problem)[:, :, problem.inputs.placeholders :]
        outputs.append(output if guard is None else guard.correct(part, choice.plan.weights, output))
    return restore(outputs)


def canonicalise(choice: Choice) -> tuple[Sequence[Inputs], Callable[[Sequence[Tensor]], Tensor]]:
    """The problem as the plan is written for it, in parts, and what makes the output of theirs.

    Padding is zero, squares of all entries have a float, and, where a causal plan looks at positions, no real key
    stands after padding: sequences that are padded alike are then a part.
    """
    plan, (x, unit) = choice.plan, rescaled(choice.inputs.clear())
    parts: Sequence[Inputs] = (x,)
    restore: Callable[[Sequence[Tensor]], Tensor] = lambda outputs: outputs[0]  # noqa: E731
    if x.valid is not None and plan.keep is not None and has_gaps(x):
        if x.bias is not None and has_interior_padding(x.valid):
            raise ValueError("key_mask: expected contiguous real keys with distance_bias, got padding between them")
        parts, restore = without_gaps(x, x.valid)
    return parts, restore if unit is None else lambda outputs: restore(outputs) * unit


def prepare(inputs: Inputs, plan: Plan) -> Problem:
    """What is left to the executor once the plan has chosen the keys and summarised the others."""
    graph = select(inputs, plan)
    x = graph.inputs
    problem = Problem(x, graph, plan.rest.prepare(x, graph, plan.weights), plan.weights)
    if x.bias is not None and (reason := problem.unbiased) is not None:
        fix = "Window, Sinks and Leverage with Drop()" if x.is_causal else "budget(slots), its parts, or Drop()"
        raise ValueError(f"distance_bias: {reason}; use {fix}")
    return problem


def select(inputs: Inputs, plan: Plan) -> Graph:
    """The keys that the plan keeps.

    Where its stand-ins begin with the first token, block by block, the inputs of the graph do so, too: their first
    `placeholders` queries belong to earlier tokens.
    """
    if plan.keep is None:
        raise ValueError("plan: expected one that chooses keys, got exact attention")
    if plan.rest.needs_causal and inputs.offset:
        parts = [held.recent for part in plan.keep.parts if (held := part.remembered) is not None]
        inputs = inputs.from_start(max(recent.size * recent.blocks for recent in parts if recent is not None))
    with constants():
        return plan.keep.select(inputs)


def by_plan(inputs: Inputs, plans: Plan | Sequence[Plan]) -> Iterator[tuple[Plan, Tensor, Inputs]]:
    """The distinct plans of the key heads, each with its heads (H,) and the problem of these heads alone."""
    plans = (plans,) if isinstance(plans, Plan) else plans
    if len(plans) == 1:
        plans = [*plans] * inputs.kv_heads
    if len(plans) != inputs.kv_heads:
        raise ValueError(f"plan: expected one plan for each of {inputs.kv_heads} key heads, got {len(plans)}")
    heads: dict[Plan, list[int]] = {}
    for head, plan in enumerate(plans):
        heads.setdefault(plan, []).append(head)
    for plan, its_heads in heads.items():
        index = torch.tensor(its_heads, device=inputs.key.device)
        yield plan, index, inputs if len(heads) == 1 else inputs.heads(index)


def never_exact(plan: Plan | Sequence[Plan]) -> Plan | Sequence[Plan]:
    """The plan, or the plans, without leave to give way to exact attention where that is faster."""
    return plan.never_exact() if isinstance(plan, Plan) else tuple(one.never_exact() for one in plan)


def check_plan(plan: object) -> None:
    """Raise `TypeError` for what is neither a plan nor a sequence of plans."""
    for one in (plan,) if isinstance(plan, Plan) or not isinstance(plan, Sequence) else plan:
        if not isinstance(one, Plan):
            raise TypeError(f"plan: expected a fewkeys.Plan, got {type(one).__name__}; budget(slots) makes one")
