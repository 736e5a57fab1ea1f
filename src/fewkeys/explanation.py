"""What `fewkeys.attention` does with a call, and why."""

from dataclasses import dataclass
from typing import Literal, Unpack

from torch import Tensor

from fewkeys import flow
from fewkeys.core.clock import in_words
from fewkeys.core.inputs import Inputs
from fewkeys.core.precision import full_precision
from fewkeys.core.validation import Options
from fewkeys.cost.crossover import expected, goes_by_block
from fewkeys.cost.operations import exact_operations, plan_operations
from fewkeys.execute import dispatch
from fewkeys.execute.problem import prepare
from fewkeys.native.build import instruction_set
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
        executor = "" if self.executor is None else f", by {NAMES.get(self.executor, self.executor)}{processor}"
        text = f"runs the plan{executor}: {self.reason}"
        return text if self.uncompiled is None else f"{text}; no compiled kernels: {self.uncompiled}"


def explain(query: Tensor, key: Tensor, value: Tensor, *, plan: Plan, **options: Unpack[Options]) -> Explanation:
    """What `fewkeys.attention` does with such a call on this machine, and why, as a value and in words (`print`).

    Options and errors are those of `attention`, without `keep`, `rest`, `weights` and `max_error`; `plan` is one plan,
    not one for each head. `explain` chooses keys and makes stand-ins, on which the executor depends. For a plan with
    `exact_if_faster` the first call measures the machine: some tenths of a second on a CPU.
    """
    if not isinstance(plan, Plan):
        raise TypeError(f"plan: expected a fewkeys.Plan, got {type(plan).__name__}; pass the plan of one head")
    choice = flow.choose(plan, flow.checked(query, key, value, **options))
    reason = (choice.reason, None, None) if choice.reason != flow.FASTER else _times(choice.inputs, plan)
    if choice.is_exact:
        return Explanation("exact", *reason)
    with full_precision():
        parts, _ = flow.canonicalise(choice)
        executor, uncompiled = dispatch.choose(prepare(parts[0], plan)) if parts else (None, None)  # none: all padding
    return Explanation("plan", *reason, executor, uncompiled, instruction_set() if executor == "native" else None)


def _times(x: Inputs, plan: Plan) -> tuple[str, float | None, float | None]:
    """In words, and the expected milliseconds of exact attention and of the plan."""
    if goes_by_block(x, plan):
        return "the plan goes block by block, for which a GPU has no kernels; never_exact() runs it", None, None
    times = expected(x, plan)
    if times is None:
        operations = f"{plan_operations(x, plan):.0f} operations per query against {exact_operations(x):.0f}"
        return f"{operations} of exact attention", None, None
    ms = f"about {in_words(times.plan)} for the plan, {in_words(times.exact)} for exact attention"
    return f"{ms}, by what this machine was measured to do", times.exact, times.plan
