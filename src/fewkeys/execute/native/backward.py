"""Softmax attention with gradients: a compiled kernel forward, torch's operations backward."""

from __future__ import annotations

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

    The weights are computed again in the backward pass, so that nothing but the inputs and the stand-ins is stored.
    """
    followed = with_gradients(problem)

    def computed(*tensors: Tensor) -> Tensor:
        return by_torch.attend(_with(problem, dict(zip(followed, tensors, strict=True))))

    return recomputed(lambda *_: forward.attend(problem), computed, *followed.values())


def with_gradients(problem: Problem) -> dict[str, Tensor]:
    """The tensors of a problem that require gradients, if these are enabled; stand-ins' by `rest.` and the field."""
    x, s = problem.inputs, problem.stand_ins
    tensors = {"query": x.query, "key": x.key, "value": x.value} | ({} if s is None else s.tensors("rest"))
    return {name: part for name, part in tensors.items() if torch.is_grad_enabled() and part.requires_grad}


def _with(problem: Problem, tensors: dict[str, Tensor]) -> Problem:
    """The same problem of these tensors, named as in `with_gradients`."""
    x, s = problem.inputs, problem.stand_ins
    of_inputs: dict[str, Any] = {name: part for name, part in tensors.items() if not name.startswith("rest.")}
    stand_ins = None if s is None else s.with_tensors(s.tensors("rest") | tensors, "rest")
    return replace(problem, inputs=replace(x, **of_inputs), stand_ins=stand_ins)
