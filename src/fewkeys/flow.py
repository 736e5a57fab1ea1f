"""From the arguments of a call to its output, in four steps.

    choose        exact attention or the plan, and the reason; reads no data
    canonicalise  rescales entries that are too large, and moves padding behind the real keys
    prepare       chooses the keys to keep, and makes the stand-ins for all others (`fewkeys.execute.problem`)
    run           computes the output of a choice by the two steps above; a guard may correct it (`fewkeys.guard`)

`attention`, `explain`, spot checks and comparisons share them.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Unpack

import torch
from torch import Tensor

from fewkeys.core.extent import FINITE, STRONGEST, rescaled
from fewkeys.core.gaps import Restore, without_gaps
from fewkeys.core.impl import Impl
from fewkeys.core.inputs import Inputs
from fewkeys.core.precision import full_precision
from fewkeys.core.validation import Options, Rows, check_inputs, unknown_option
from fewkeys.cost.crossover import exact_is_faster
from fewkeys.execute import exact
from fewkeys.execute.native import by_heads
from fewkeys.guard.fallback import Guard
from fewkeys.native import kernels
from fewkeys.native.tensors import is_trained
from fewkeys.plan import Plan


@dataclass(frozen=True, eq=False)
class Choice:
    """Whether exact attention or `plan` answers `inputs`, and the reason."""

    inputs: Inputs
    plan: Plan
    is_exact: bool
    reason: str


FASTER = "by what is expected to be faster"


def checked(
    query: Tensor, key: Tensor, value: Tensor, plan: Plan | Sequence[Plan] = (), **options: Unpack[Options]
) -> Inputs:
    """The validated problem of a call; padding is not cleared. Raises `ValueError` or `TypeError` for bad arguments.

    A plan with cohorts reads the rows of a head in any order: they are copied head by head if it will answer, all of
    them here or a few heads at a time (`by_heads`). Not with a bias, which takes far longer than a copy saves.
    """
    for name in options.keys() - Options.__annotations__.keys():
        raise unknown_option(name)
    plans = (plan,) if isinstance(plan, Plan) else plan
    has_cohorts = any(plan.keep is not None and plan.keep.cohort_lists > 1 for plan in plans)
    is_copied = has_cohorts and options.get("distance_bias") is None
    how = options.get("is_causal", False), options.get("query_offset", 0), options.get("impl", "auto")

    def look(query: Tensor, key: Tensor, value: Tensor) -> tuple[list[float], Rows]:
        rows = query, key, value
        by_head = is_copied and by_heads.are_few(*rows) and not gives_way(plan, rows, *how)
        return kernels.largest_and_rows(query, key, value, by_head)

    return check_inputs(query, key, value, look=look, clear=False, **options)


def attend(inputs: Inputs, plan: Plan | Sequence[Plan], guard: Guard | None = None) -> Tensor:
    """The output of a plan, or of one plan for each key head; corrected by the guard, if any."""
    if isinstance(plan, Plan):
        return _guarded(plan, inputs, guard)
    parts = [(_guarded(plan, part, guard), heads) for plan, heads, part in by_plan(inputs, plan)]
    if len(parts) == 1:
        return parts[0][0]
    order = torch.cat([heads for _, heads in parts]).argsort()
    return torch.cat([output for output, _ in parts], 1)[:, order]


def _guarded(plan: Plan, inputs: Inputs, guard: Guard | None) -> Tensor:
    choice = choose(plan, inputs, guard)
    output = run(choice)
    return output if guard is None or choice.is_exact else guard.correct(inputs, plan.weights, output)


def choose(plan: Plan, inputs: Inputs, guard: Guard | None = None) -> Choice:
    """Exact attention or the plan, from shapes alone. Raises `ValueError` if the plan cannot run on such inputs."""
    plan.check(inputs)
    if plan.keep is None:
        return Choice(inputs, plan, True, "the plan keeps every key")
    if guard is not None and inputs.queries <= guard.queries:
        return Choice(inputs, plan, True, "the check of so few queries is their answer")
    if inputs.impl == "reference":
        return Choice(inputs, plan, False, "the reference runs every plan as it is defined")
    if plan.keep.covers(inputs):
        return Choice(inputs, plan, True, "the plan's keys are all there are")
    if not plan.exact_if_faster:
        return Choice(inputs, plan, False, "it does not say exact_if_faster")
    if inputs.impl != "auto":
        return Choice(inputs, plan, False, 'impl="auto" alone looks for what is faster')
    return Choice(inputs, plan, exact_is_faster(inputs, plan), FASTER)


def gives_way(plan: Plan | Sequence[Plan], rows: Rows, is_causal: bool, offset: int, impl: Impl) -> bool:
    """Whether `choose` takes exact attention for all heads of a call; decided once for each shape, to cost little."""
    plans, shapes = (plan,) if isinstance(plan, Plan) else tuple(plan), tuple(part.shape for part in rows)
    if impl != "auto" or not any(plan.exact_if_faster for plan in plans):
        return False
    how = (rows[0].dtype, rows[0].device, is_causal, offset, torch.get_num_threads(), is_trained(*rows))
    return _gives_way(plans, shapes, *how)


@lru_cache(4096)
def _gives_way(
    plans: tuple[Plan, ...],
    shapes: tuple[torch.Size, ...],
    dtype: torch.dtype,
    device: torch.device,
    is_causal: bool,
    offset: int,
    threads: int,  # which `exact_is_faster` asks torch for
    has_gradients: bool,
) -> bool:
    zero = torch.zeros((), dtype=dtype, device=device, requires_grad=has_gradients)
    query, key, value = map(zero.expand, shapes)
    inputs = Inputs(query, key, value, 1.0, is_causal, offset)
    return all(choose(plan, part).is_exact for plan, _, part in by_plan(inputs, plans))


@full_precision()
def run(choice: Choice) -> Tensor:
    """The output (B, Hq, Nq, Dv) of a choice."""
    if choice.is_exact:
        return exact.attend(choice.inputs, choice.plan.weights)
    parts, restore = canonicalise(choice)
    return restore([by_heads.attend(part, choice.plan) for part in parts])


def canonicalise(choice: Choice) -> tuple[list[Inputs], Restore]:
    """The parts of the problem, and a function that joins their outputs.

    In each part padding is zero and, under causality, behind the real keys; squares of all entries are finite.
    """
    keep, rest = choice.plan.keep, choice.plan.rest
    # Without squares of scores no query that sees no large key needs smaller scores.
    has_squares = keep is None or not (keep.causal and rest.causal) or bool(rest.running)
    x, in_old_units = rescaled(choice.inputs.clear(), STRONGEST if has_squares else FINITE)
    parts, joined = without_gaps(x)
    return parts, lambda outputs: in_old_units(joined(outputs))


def by_plan(inputs: Inputs, plans: Plan | Sequence[Plan]) -> Iterator[tuple[Plan, Tensor, Inputs]]:
    """The distinct plans of the key heads, each with its query heads (H,) and their problem."""
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
        query_heads = torch.arange(inputs.query_heads, device=index.device).view(inputs.kv_heads, -1)[index]
        yield plan, query_heads.flatten(), inputs if len(heads) == 1 else inputs.heads(index)


def check_plan(plan: object) -> None:
    """Refuse what is neither a plan nor a sequence of plans."""
    for part in plan if isinstance(plan, Sequence) else (plan,):
        if not isinstance(part, Plan):
            raise TypeError(f"plan: expected a fewkeys.Plan, got {type(part).__name__}; budget(slots) makes one")
