"""The whole flow on one screen: check the inputs, select the keys, summarise the rest, attend, check what came out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Unpack

import torch
from torch import Tensor

from fewkeys import native
from fewkeys.core.extent import tamed
from fewkeys.core.gaps import has_gaps, is_torn, without_gaps
from fewkeys.core.inputs import Inputs
from fewkeys.core.precision import full_precision
from fewkeys.core.validation import Options, check_inputs
from fewkeys.cost.crossover import by_the_faster, exact_is_faster
from fewkeys.execute import dispatch, exact
from fewkeys.execute.problem import Problem
from fewkeys.guard.fallback import Guard
from fewkeys.plan import Plan


def answer(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    plan: Plan | Sequence[Plan],
    max_error: float | Guard | None = None,
    **options: Unpack[Options],
) -> Tensor:
    """`fewkeys.attention` of a plan, or of one plan for each key head; `options` are those of `check_inputs`."""
    inputs = check_inputs(query, key, value, largest=native.largest, clear=False, **options)
    if max_error is None:
        return run(inputs, plan)
    guard = max_error if isinstance(max_error, Guard) else Guard(max_error)
    guard.count_call()
    return run(inputs, plan, guard)


@full_precision()
def run(inputs: Inputs, plan: Plan | Sequence[Plan], guard: Guard | None = None) -> Tensor:
    """The output of a plan, or of one plan for each key head, on checked inputs; corrected by the guard, if any."""
    if not isinstance(plan, Plan):
        parts = [(run(part, own, guard), heads) for own, heads, part in by_plan(inputs, plan)]
        output = torch.cat([out.unflatten(1, (-1, inputs.gqa_ratio)) for out, _ in parts], 1)
        order = torch.cat([heads for _, heads in parts]).argsort()
        return output[:, order].flatten(1, 2)
    plan = fitting(inputs, plan)
    plan.check(inputs)
    # As many exact rows as queries are the exact answer: then the check is the answer, and needs no plan.
    checked_whole = guard is not None and inputs.queries <= guard.queries
    if checked_whole or answers_exactly(inputs, plan):
        return exact.attend(inputs, plan.weights)
    inputs = inputs.clear()
    if inputs.wild:
        tame, unit = tamed(inputs)
        return run(tame, plan, guard) * unit
    if inputs.valid is not None and plan.keep is not None and not plan.keep.by_real_place and has_gaps(inputs):
        if inputs.bias is not None and is_torn(inputs.valid):
            raise ValueError("key_mask: expected real keys side by side with distance_bias, got padding among them")
        return without_gaps(inputs, inputs.valid, lambda own: run(own, plan, guard))
    whole = from_first(inputs, plan)
    if whole is not inputs:
        return run(whole, plan, guard)[:, :, whole.filler :]
    output = dispatch.attend(prepare(by_the_faster(inputs, plan), plan))
    return output if guard is None else guard.correct(inputs, plan.weights, output)


def fitting(inputs: Inputs, plan: Plan) -> Plan:
    """The plan that such inputs get: a bias of the distance is of single queries, and knows no cohorts of them."""
    return plan if inputs.bias is None else plan.without_cohorts()


def from_first(inputs: Inputs, plan: Plan) -> Inputs:
    """The problem from the first token on, if that is where the plan's stand-ins begin: block by block."""
    if plan.keep is None or not plan.rest.needs_causal or not inputs.offset:
        return inputs
    parts = [held.recent for part in plan.keep.parts if (held := part.remembered) is not None]
    return inputs.from_start(max(recent.size * recent.blocks for recent in parts if recent is not None))


def prepare(inputs: Inputs, plan: Plan) -> Problem:
    """What is left to the executor once the plan has chosen the keys and summarised the others."""
    if plan.keep is None:
        raise ValueError("plan: expected one that chooses keys, got exact attention")
    with torch.no_grad():
        graph = plan.keep.select(inputs)
    problem = Problem(inputs, graph, plan.rest.prepare(inputs, graph, plan.weights), plan.weights)
    if inputs.bias is not None and (reason := problem.unbiased) is not None:
        fix = "Window, Sinks and Leverage with Drop()" if inputs.is_causal else "budget(slots), its parts, or Drop()"
        raise ValueError(f"distance_bias: {reason}; use {fix}")
    return problem


def answers_exactly(inputs: Inputs, plan: Plan) -> bool:
    """Whether `run` answers such inputs with exact attention, whatever the data.

    That is no matter of executors, but `"reference"` runs every plan as it is defined, and only `"auto"` may prefer
    exact attention for its speed.
    """
    if plan.keep is None:
        return True
    if inputs.impl == "reference":
        return False
    return plan.keep.covers(inputs) or (
        inputs.impl == "auto" and plan.exact_if_faster and exact_is_faster(inputs, plan)
    )


def always(plan: Plan | Sequence[Plan]) -> Plan | Sequence[Plan]:
    """The plan, or the plans, without leave to give way to exact attention where that is faster."""
    return plan.always() if isinstance(plan, Plan) else tuple(own.always() for own in plan)


def by_plan(inputs: Inputs, plans: Sequence[Plan]) -> Iterator[tuple[Plan, Tensor, Inputs]]:
    """The distinct plans of the key heads, each with its heads (H,) and the problem of these heads alone."""
    if len(plans) == 1:
        plans = [*plans] * inputs.kv_heads
    if len(plans) != inputs.kv_heads:
        raise ValueError(f"plan: expected one plan for each of {inputs.kv_heads} key heads, got {len(plans)}")
    heads: dict[Plan, list[int]] = {}
    for head, plan in enumerate(plans):
        heads.setdefault(plan, []).append(head)
    for plan, own in heads.items():
        index = torch.tensor(own, device=inputs.key.device)
        yield plan, index, inputs if len(heads) == 1 else inputs.heads(index)


def check_plan(plan: object) -> None:
    """Raise `TypeError` for what is neither a plan nor a sequence of plans."""
    for one in (plan,) if isinstance(plan, Plan) or not isinstance(plan, Sequence) else plan:
        if not isinstance(one, Plan):
            raise TypeError(f"plan: expected a fewkeys.Plan, got {type(one).__name__}; budget(slots) makes one")
