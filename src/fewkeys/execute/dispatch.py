"""The door to the executors: one switch, `impl`, and no silent way around it.

All executors give the same answer up to rounding, at different speeds.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from fewkeys.execute import native, reference, torch
from fewkeys.execute.problem import Problem
from fewkeys.tree.descent import Descent


class Executor(Protocol):
    """A way to run a plan: a module of these two functions."""

    def unsupported(self, problem: Problem) -> str | None:
        """Why it cannot answer, to follow "impl=...:"; None where it can. Reads no data."""

    def attend(self, problem: Problem) -> Tensor:
        """The output (B, Hq, Nq, Dv)."""


EXECUTORS: dict[str, Executor] = {"reference": reference, "torch": torch, "native": native}


def attend(problem: Problem) -> Tensor:
    """The output (B, Hq, Nq, Dv) by the executor that `problem.inputs.impl` names.

    `"auto"` takes the compiled kernels for the CPU (`"native"`) where they know such a problem, else operations of
    torch (`"torch"`). Triton's kernels are experimental, and run where they are asked for only.

    Raises `ValueError` where the executor named cannot answer, with the reason.
    """
    return EXECUTORS[choose(problem)[0]].attend(problem)


def attend_each(problems: Sequence[Problem]) -> list[Tensor]:
    """The outputs of problems that one plan made of parts of a batch: by one call of a kernel, if there is one.

    Every output is what `attend` gives, to the last bit.
    """
    if len(problems) > 1 and isinstance(problems[0].graph.descent, Descent) and choose(problems[0])[0] == "native":
        return native.attend_each(problems)
    return [attend(one) for one in problems]


def choose(problem: Problem) -> tuple[str, str | None]:
    """The name of the executor, and why it is not the compiled kernels where `"auto"` could not take them."""
    impl = problem.inputs.impl
    if impl == "auto":
        reason = native.unsupported(problem)
        return ("native", None) if reason is None else ("torch", reason)
    if (reason := EXECUTORS[impl].unsupported(problem)) is not None:
        raise ValueError(f"impl={impl!r}: {reason}; use impl='torch'")
    return impl, None
