"""Chooses the executor: one switch, `impl`, and no silent fallback."""

from typing import Protocol

from torch import Tensor

from fewkeys.execute import native, reference, torch
from fewkeys.execute.problem import Problem


class Executor(Protocol):
    """A module that runs plans. `unsupported`: why it cannot, to follow "impl=...:", without reading data."""

    def unsupported(self, problem: Problem) -> str | None: ...
    def attend(self, problem: Problem) -> Tensor: ...


EXECUTORS: dict[str, Executor] = {"reference": reference, "torch": torch, "native": native}


def attend(problem: Problem) -> Tensor:
    """The output (B, Hq, Nq, Dv) of the queries that are no placeholders."""
    return EXECUTORS[choose(problem)[0]].attend(problem)[:, :, problem.inputs.placeholders :]


def choose(problem: Problem) -> tuple[str, str | None]:
    """The name of the executor, and why `"auto"` takes `"torch"`, if it does. `ValueError` if another cannot answer."""
    impl = problem.inputs.impl
    if impl == "auto":
        reason = native.unsupported(problem)
        return ("native", None) if reason is None else ("torch", reason)
    if (reason := EXECUTORS[impl].unsupported(problem)) is not None:
        raise ValueError(f"impl={impl!r}: {reason}; use impl='torch'")
    return impl, None
