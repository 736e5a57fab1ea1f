"""Softmax attention where somebody asks for gradients: compiled kernels in both directions.

`native/near_back.h`: a band, one shared list and stand-ins; `native/blocks_back.h`: lists and means by blocks.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor

from fewkeys.core.graph import Columns, Graph
from fewkeys.core.inputs import Inputs
from fewkeys.core.weights import Weights
from fewkeys.execute.native import forward as compiled
from fewkeys.native.build import call
from fewkeys.native.tensors import Rows, dense, pointers, readable, wants_gradient
from fewkeys.past.scan import ByStep
from fewkeys.rest.base import BlockStandIns, StandIns

Again = Callable[[Inputs, "StandIns | BlockStandIns | None"], Tensor]


class _BlocksBack(ctypes.Structure):
    _fields_ = (
        ("of", compiled.Blocks),
        ("out", Rows),
        *((name, ctypes.c_void_p) for name in ("query", "key", "value", "means")),
    )


class _NearBack(ctypes.Structure):
    _fields_ = (
        ("of", compiled.Near),
        ("out", Rows),
        *((name, ctypes.c_void_p) for name in ("query", "key", "value", "shared_key", "shared_value")),
    )


def supports(inputs: Inputs, graph: Graph, stand_ins: StandIns | BlockStandIns | None, weights: Weights) -> bool:
    """Whether `attend` answers such a problem."""
    x, s = inputs, stand_ins
    if not compiled.knows(graph, s, weights) or (isinstance(s, BlockStandIns) and graph.columns is None):
        return False
    # Plans take these for constants, and so do the kernels.
    if isinstance(s, StandIns) and wants_gradient(s.bias, s.factor, s.right):
        return False
    return x.query.dtype == x.key.dtype == x.value.dtype and readable(x.query, x.key, x.value, *_parts(s))


def attend(inputs: Inputs, graph: Graph, stand_ins: StandIns | BlockStandIns | None, again: Again) -> Tensor:
    """`compiled.attend` with gradients of queries, keys, values and what the stand-ins hold of keys and values.

    With weights P, values v and the gradient g of the output, the scores have the gradient
    `P (g v^T - rowsum(P g v^T))`; the weights are made again from the inputs, so nothing but these is kept. `again`
    does the same by torch's operations: through it go derivatives of the gradients. Cost 5/2 that of the output.
    """
    x = inputs
    problem = _Problem(x, graph, stand_ins, again)
    output: Tensor = _Attended.apply(problem, x.query, x.key, x.value, *_parts(stand_ins))  # type: ignore[no-untyped-call]
    return output


def _parts(stand_ins: StandIns | BlockStandIns | None) -> tuple[Tensor, ...]:
    """What carries gradients."""
    if stand_ins is None:
        return ()
    if isinstance(stand_ins, BlockStandIns):
        return (stand_ins.by_step.rows,)
    left = () if stand_ins.left is None else (stand_ins.left,)
    return (stand_ins.key, stand_ins.value, *left)


@dataclass(frozen=True, eq=False)
class _Problem:
    inputs: Inputs
    graph: Graph
    stand_ins: StandIns | BlockStandIns | None
    again: Again

    def of(self, query: Tensor, key: Tensor, value: Tensor, *parts: Tensor) -> _Problem:
        """The same problem of these tensors."""
        x, s = replace(self.inputs, query=query, key=key, value=value), self.stand_ins
        if isinstance(s, BlockStandIns):
            s = BlockStandIns(replace(s.by_step, rows=parts[0]), s.head_dim)
        elif s is not None:
            s = replace(s, key=parts[0], value=parts[1], left=parts[2] if parts[2:] else None)
        return replace(self, inputs=x, stand_ins=s)


class _Attended(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, problem: _Problem, *given: Tensor) -> Tensor:
        ctx.save_for_backward(*given)
        ctx.problem = problem
        return compiled.attend(problem.inputs, problem.graph, problem.stand_ins)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        # Views: the stand-ins depend on keys and values, too, which is for others to follow.
        given = [rows.view_as(rows) for rows in ctx.saved_tensors]
        problem = ctx.problem.of(*given)
        if torch.is_grad_enabled():
            output = problem.again(problem.inputs, problem.stand_ins)
            return None, *torch.autograd.grad(output, given, gradient, create_graph=True)
        x = problem.inputs
        x = replace(x, query=dense(x.query), key=dense(x.key), value=dense(x.value))
        gradient = dense(gradient.to(x.query.dtype))
        if compiled.by_block(problem.graph, problem.stand_ins):
            means = None if problem.stand_ins is None else problem.stand_ins.by_step
            found = _blocks_back(x, problem.graph.columns, means, gradient)
        else:
            found = _near_back(x, problem.graph, problem.stand_ins, gradient)
        return None, *(part.to(rows.dtype) for part, rows in zip(found, given, strict=True))


def _blocks_back(x: Inputs, columns: Columns, means: ByStep | None, gradient: Tensor) -> Sequence[Tensor]:
    given = (x.query, x.key, x.value, *(() if means is None else (means.rows,)))
    found = _zeros(given)
    problem, _alive = compiled.blocks(x, columns, means, gradient)
    held = pointers(dict(zip(("query", "key", "value", "means"), found, strict=False)))
    call("fewkeys_attend_blocks_back", _BlocksBack(of=problem, out=Rows.of(gradient), **held), x.query.dtype)
    return found


def _near_back(x: Inputs, graph: Graph, stand_ins: StandIns | None, gradient: Tensor) -> Sequence[Tensor]:
    query, key, value = found = _zeros((x.query, x.key, x.value))
    problem, alive = compiled.near(x, graph, stand_ins, gradient)
    shared = _zeros([cast(Tensor, alive[name]) for name in ("shared_key", "shared_value")])
    names = ("query", "key", "value", "shared_key", "shared_value")
    held = pointers(dict(zip(names, (*found, *shared), strict=True)))
    call("fewkeys_attend_back", _NearBack(of=problem, out=Rows.of(gradient), **held), x.query.dtype)
    sizes = [problem.entries, problem.means, problem.rank]
    list_key, mean_key, left = shared[0].split(sizes, 2)
    list_value, mean_value, _ = shared[1][..., : x.value_dim].split(sizes, 2)
    if graph.columns is not None:
        # Fillings of the list have no weight, so their gradients are zero.
        index = graph.columns.index.squeeze(2).unsqueeze(-1)
        for to, rows in ((key, list_key), (value, list_value)):
            to.scatter_add_(2, index.expand_as(rows), rows)
    if stand_ins is None:
        return found
    return (query, key, value, mean_key, mean_value, *(() if stand_ins.left is None else (left.mT,)))


def _zeros(given: Sequence[Tensor]) -> list[Tensor]:
    return [torch.zeros(rows.shape, dtype=torch.float32) for rows in given]
