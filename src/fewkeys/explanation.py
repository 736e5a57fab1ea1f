"""What `fewkeys.attention` does with a call, and why."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, Unpack

from torch import Tensor

from fewkeys.core.clock import in_words
from fewkeys.core.inputs import Inputs
from fewkeys.core.precision import full_precision
from fewkeys.core.validation import Options, check_inputs
from fewkeys.cost.crossover import by_the_faster, exact_is_faster, expected
from fewkeys.cost.operations import exact_operations, plan_operations
from fewkeys.execute import dispatch
from fewkeys.flow import fitting, from_first, prepare
from fewkeys.native import instruction_set
from fewkeys.plan import Plan
from fewkeys.tree.descent import Descent

NAMES = {"reference": "the dense reference", "torch": "torch", "native": "compiled kernels"}


@dataclass(frozen=True)
class Explanation:
    """Which way a call goes.

    Attributes:
        runs: exact attention or the plan.
        reason: why.
        exact_ms, plan_ms: what both are expected to take, None where that is not asked.
        executor: which code runs the plan, by the name that `impl` has for it; None for exact attention.
        uncompiled: why `impl="auto"` runs the plan without the compiled kernels for the CPU; None where it has them.
        kernels: the instruction set of these kernels; None where they do not run.
        slots, mass: of a plan whose queries stop at a share of their mass (`KeyTree(slots, mass)`), what they pay on
            average, and the mean share of the mass on keys that they keep: at least, where it is certified, else
            estimated. None of other plans.
    """

    runs: Literal["exact", "plan"]
    reason: str
    exact_ms: float | None = None
    plan_ms: float | None = None
    executor: str | None = None
    uncompiled: str | None = None
    kernels: str | None = None
    slots: float | None = None
    mass: float | None = None

    def __str__(self) -> str:
        if self.executor is None:
            return f"runs exact attention: {self.reason}"
        of = "" if self.kernels is None else f" for {self.kernels}"
        told = f"runs the plan, by {NAMES[self.executor]}{of}: {self.reason}"
        if self.slots is not None and self.mass is not None:
            told += f"; {self.slots:.1f} slots a query keep {self.mass:.4f} of its mass"
        return told if self.uncompiled is None else f"{told}; no compiled kernels: {self.uncompiled}"


@full_precision()
def explain(query: Tensor, key: Tensor, value: Tensor, *, plan: Plan, **options: Unpack[Options]) -> Explanation:
    """What `fewkeys.attention` does with such a call on this machine, and why.

    Arguments and errors are those of `attention`. Attends to nothing, but chooses keys and summarises the others, which
    tells the executor. For a plan that may give way to exact attention it measures the machine, where that was never
    done: some tenths of a second.
    """
    if not isinstance(plan, Plan):
        raise TypeError(f"plan: expected a fewkeys.Plan, got {type(plan).__name__}; ask for the plan of each head")
    x = check_inputs(query, key, value, **options)
    given, plan = plan, fitting(x, plan)
    plan.check(x)
    found = _way(x, plan)
    if plan is not given:
        found = replace(found, reason=f"{found.reason}; without cohorts, which a bias of the distance does not know")
    if found.runs == "exact":
        return found
    x = from_first(x, plan)
    faster = by_the_faster(x, plan)
    problem = prepare(faster, plan)
    executor, uncompiled = dispatch.choose(problem)
    if faster is not x:
        uncompiled = f"those for {instruction_set()} are slower than torch here, at this size"
    kernels = instruction_set() if executor == "native" else None
    found = replace(found, executor=executor, uncompiled=uncompiled, kernels=kernels)
    descent = problem.graph.descent
    if not isinstance(descent, Descent) or descent.enough is None:
        return found
    return replace(found, slots=problem.graph.slots(), mass=problem.graph.mean(descent.share()))


def _way(x: Inputs, plan: Plan) -> Explanation:
    if plan.keep is None:
        return Explanation("exact", "the plan keeps every key")
    if x.impl == "reference":
        return Explanation("plan", "the reference runs every plan as it is defined")
    if plan.keep.covers(x):
        return Explanation("exact", "the plan's keys are all there are")
    if not plan.exact_if_faster:
        return Explanation("plan", "it does not say exact_if_faster")
    if x.impl != "auto":
        return Explanation("plan", 'impl="auto" alone looks for what is faster')
    own, exact = plan_operations(x, plan), exact_operations(x)
    runs: Literal["exact", "plan"] = "exact" if exact_is_faster(x, plan) else "plan"
    found = None if own >= exact else expected(x, plan)
    if found is None:
        return Explanation(runs, f"{own:.0f} operations per query against {exact:.0f} of exact attention")
    ms = found.steps if found.kernels_lose and found.steps is not None else found.plan
    return Explanation(
        runs,
        f"about {in_words(ms)} for the plan, {in_words(found.exact)} for exact attention, by what this machine "
        "was measured to do",
        found.exact,
        ms,
    )
