"""What `fewkeys.attention` does with a call, and why."""

from dataclasses import dataclass, replace
from typing import Literal, Unpack

from torch import Tensor

from fewkeys import flow
from fewkeys.core.clock import in_words
from fewkeys.core.precision import full_precision
from fewkeys.core.validation import Options
from fewkeys.cost.crossover import expected, goes_by_block
from fewkeys.cost.operations import exact_operations, plan_operations
from fewkeys.execute import dispatch
from fewkeys.execute.problem import prepare
from fewkeys.native import instruction_set
from fewkeys.plan import Plan

NAMES = {"reference": "the dense reference", "torch": "torch", "native": "compiled kernels"}


@dataclass(frozen=True)
class Explanation:
    """What runs for a call, and why.

    Attributes:
        runs: exact attention or the plan.
        reason: why.
        exact_ms, plan_ms: the expected times; None if they do not decide.
        executor: the code that runs the plan, by its name in `impl`; None for exact attention, and if all is padding.
        uncompiled: why `impl="auto"` does not run compiled kernels; None if it does.
        kernels: the instruction set of these kernels; None if they do not run.
    """

    runs: Literal["exact", "plan"]
    reason: str
    exact_ms: float | None = None
    plan_ms: float | None = None
    executor: str | None = None
    uncompiled: str | None = None
    kernels: str | None = None

    def __str__(self) -> str:
        if self.runs == "exact":
            return f"runs exact attention: {self.reason}"
        processor = "" if self.kernels is None else f" for {self.kernels}"
        executor = "" if self.executor is None else f", by {NAMES[self.executor]}{processor}"
        text = f"runs the plan{executor}: {self.reason}"
        return text if self.uncompiled is None else f"{text}; no compiled kernels: {self.uncompiled}"


@full_precision()
def explain(query: Tensor, key: Tensor, value: Tensor, *, plan: Plan, **options: Unpack[Options]) -> Explanation:
    """What `fewkeys.attention` does with such a call on this machine, and why. It has the same arguments and errors.

    It chooses keys and makes stand-ins, on which the executor depends. For a plan with `exact_if_faster` the first call
    measures the machine: on a CPU some tenths of a second.
    """
    if not isinstance(plan, Plan):
        raise TypeError(f"plan: expected a fewkeys.Plan, got {type(plan).__name__}; pass the plan of one head")
    choice = flow.choose(plan, flow.checked(query, key, value, **options))
    explanation = _of_choice(choice)
    parts = [] if choice.is_exact else flow.canonicalise(choice)[0]
    if not parts:  # exact attention, or padding alone
        return explanation
    executor, uncompiled = dispatch.choose(prepare(parts[0], choice.plan))
    kernels = instruction_set() if executor == "native" else None
    return replace(explanation, executor=executor, uncompiled=uncompiled, kernels=kernels)


def _of_choice(choice: flow.Choice) -> Explanation:
    runs: Literal["exact", "plan"] = "exact" if choice.is_exact else "plan"
    if choice.reason != flow.FASTER:
        return Explanation(runs, choice.reason)
    x, plan = choice.inputs, choice.plan
    if goes_by_block(x, plan):
        return Explanation(runs, "the plan goes block by block, for which a GPU has no kernels; never_exact() runs it")
    times = expected(x, plan)
    if times is None:
        operations = f"{plan_operations(x, plan):.0f} operations per query against {exact_operations(x):.0f}"
        return Explanation(runs, f"{operations} of exact attention")
    ms = f"about {in_words(times.plan)} for the plan, {in_words(times.exact)} for exact attention"
    return Explanation(runs, f"{ms}, by what this machine was measured to do", times.exact, times.plan)
