"""Chooses the executor: one switch, `impl`, and no silent fallback.

All executors give the same answer up to rounding, at different speeds.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from fewkeys.execute import native, reference, torch
from fewkeys.execute.problem import Problem


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
    torch (`"torch"`).

    Raises `ValueError` where the executor named cannot answer, with the reason.
    """
    return EXECUTORS[choose(problem)[0]].attend(problem)


def choose(problem: Problem) -> tuple[str, str | None]:
    """The name of the executor, and why it is not the compiled kernels where `"auto"` could not take them."""
    impl = problem.inputs.impl
    if impl == "auto":
        reason = native.unsupported(problem)
        return ("native", None) if reason is None else ("torch", reason)
    if (reason := EXECUTORS[impl].unsupported(problem)) is not None:
        raise ValueError(f"impl={impl!r}: {reason}; use impl='torch'")
    return impl, None
