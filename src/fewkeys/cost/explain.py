"""What `impl="auto"` does with a call, and why."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from torch import Tensor

from fewkeys import native
from fewkeys.core.inputs import Inputs
from fewkeys.core.validation import check_inputs
from fewkeys.cost.crossover import expected
from fewkeys.cost.operations import exact_operations, plan_operations
from fewkeys.plan import Plan


@dataclass(frozen=True)
class Explanation:
    """Which way a call goes.

    Attributes:
        runs: exact attention or the plan.
        reason: why.
        exact_ms, plan_ms: what both are expected to take, None where that is not asked.
        uncompiled: why the plan runs without the compiled kernels for the CPU; None where it has them, and on GPUs.
    """

    runs: Literal["exact", "plan"]
    reason: str
    exact_ms: float | None = None
    plan_ms: float | None = None
    uncompiled: str | None = None

    def __str__(self) -> str:
        told = f"runs {'exact attention' if self.runs == 'exact' else 'the plan'}: {self.reason}"
        return told if self.uncompiled is None else f"{told}; the plan has no compiled kernels ({self.uncompiled})"


def explain(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    plan: Plan,
    is_causal: bool = False,
    lengths: Tensor | None = None,
    key_mask: Tensor | None = None,
    query_offset: int = 0,
) -> Explanation:
    """What `fewkeys.attention(..., impl="auto")` does with such a call on this machine, and why.

    Arguments and errors are those of `attention`. Attends to nothing; for a plan that may give way to exact attention
    it measures the machine, as `attention` does at its first call: some tenths of a second.
    """
    if not isinstance(plan, Plan):
        raise TypeError(f"plan: expected a fewkeys.Plan, got {type(plan).__name__}; ask for the plan of each head")
    x = check_inputs(
        query, key, value, is_causal=is_causal, lengths=lengths, key_mask=key_mask, query_offset=query_offset
    )
    plan.check(x)
    return replace(_explain(x, plan), uncompiled=None if query.device.type != "cpu" else native.missing())


def _explain(x: Inputs, plan: Plan) -> Explanation:
    if plan.keep is None:
        return Explanation("exact", "the plan keeps every key")
    if plan.keep.covers(x):
        return Explanation("exact", "the plan's keys are all there are")
    if not plan.exact_if_faster:
        return Explanation("plan", "it does not say exact_if_faster")
    own, exact = plan_operations(x, plan), exact_operations(x)
    if own >= exact:
        return Explanation("exact", f"{own:.0f} operations per query against {exact:.0f} of exact attention")
    found = expected(x, plan)
    return Explanation(
        "exact" if found.exact_is_faster else "plan",
        f"about {found.plan:.2g} ms for the plan, {found.exact:.2g} ms for exact attention, by short runs on this "
        "machine",
        found.exact,
        found.plan,
    )
