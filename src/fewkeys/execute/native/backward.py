"""Softmax attention with gradients: a compiled kernel forward, torch's operations backward."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fewkeys.core.derivatives import recomputed
from fewkeys.execute import torch as by_torch
from fewkeys.execute.native import forward
from fewkeys.execute.problem import Problem


def attend(problem: Problem) -> Tensor:
    """`forward.attend` with gradients of queries, keys, values and stand-ins.

    The backward pass computes the weights again: only the inputs and the stand-ins are stored.
    """
    x, s, followed = problem.inputs, problem.stand_ins, with_gradients(problem)

    def computed(*leaves: Tensor) -> tuple[Tensor]:
        tensors = dict(zip(followed, leaves, strict=True))
        rows: dict[str, Any] = {name: tensors[name] for name in _ROWS if name in tensors}
        stand_ins = None if s is None else s.with_tensors(s.tensors("rest") | tensors, "rest")
        return (by_torch.attend(replace(problem, inputs=replace(x, **rows), stand_ins=stand_ins)),)

    output: Tensor = recomputed(lambda *_: forward.attend(problem), computed, *followed.values())
    return output


def with_gradients(problem: Problem) -> dict[str, Tensor]:
    """The tensors of a problem that require gradients, if these are enabled; stand-ins' by `rest.` and the field."""
    if not torch.is_grad_enabled():
        return {}
    x, s = problem.inputs, problem.stand_ins
    tensors = {name: getattr(x, name) for name in _ROWS} | ({} if s is None else s.tensors("rest"))
    return {name: part for name, part in tensors.items() if part.requires_grad}


_ROWS = "query", "key", "value"
