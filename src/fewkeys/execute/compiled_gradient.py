"""Lists by blocks and means of the past where somebody asks for gradients: compiled kernels in both directions."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor

from fewkeys.execute import compiled
from fewkeys.graph import Columns, Graph
from fewkeys.inputs import Inputs
from fewkeys.native.build import call
from fewkeys.native.tensors import Rows, dense, pointers, readable
from fewkeys.rest.base import BlockStandIns, StandIns
from fewkeys.sketch.past import ByStep
from fewkeys.weights import Weights

Again = Callable[[Inputs, "BlockStandIns | None"], Tensor]


class _Gradients(ctypes.Structure):
    _fields_ = (
        ("of", compiled.Blocks),
        ("out", Rows),
        *((name, ctypes.c_void_p) for name in ("query", "key", "value", "means")),
    )


def supports(inputs: Inputs, graph: Graph, stand_ins: StandIns | BlockStandIns | None, weights: Weights) -> bool:
    """Whether `attend` answers such a problem."""
    x = inputs
    if graph.columns is None or not compiled.by_block(graph, stand_ins):
        return False
    if not compiled.knows(graph, stand_ins, weights):
        return False
    means = (stand_ins.by_step.rows,) if isinstance(stand_ins, BlockStandIns) else ()
    return x.query.dtype == x.key.dtype == x.value.dtype and readable(x.query, x.key, x.value, *means)


def attend(inputs: Inputs, graph: Graph, stand_ins: StandIns | BlockStandIns | None, again: Again) -> Tensor:
    """`compiled.attend` with gradients of queries, keys, values and the rows of the means.

    With weights P, values v and the gradient g of the output, the scores have the gradient
    `P (g v^T - rowsum(P g v^T))`; the weights are made again from the inputs, so nothing but these is kept. `again`
    does the same by torch's operations: through it go derivatives of the gradients. Cost 5/2 that of the output.
    """
    x = inputs
    means = cast("BlockStandIns | None", stand_ins)
    rows = None if means is None else means.by_step.rows
    output: Tensor = _Attended.apply(x.query, x.key, x.value, rows, x, graph, means, again)  # type: ignore[no-untyped-call]
    return output


class _Attended(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        rows: Tensor | None,
        inputs: Inputs,
        graph: Graph,
        stand_ins: BlockStandIns | None,
        again: Again,
    ) -> Tensor:
        ctx.save_for_backward(query, key, value, rows)
        ctx.inputs, ctx.graph, ctx.stand_ins, ctx.again = inputs, graph, stand_ins, again
        return compiled.attend(inputs, graph, stand_ins)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        # Views: the means depend on keys and values, too, which is for others to follow.
        given = [x.view_as(x) for x in ctx.saved_tensors if x is not None]
        query, key, value, *rows = given
        x = replace(ctx.inputs, query=query, key=key, value=value)
        means = replace(ctx.stand_ins.by_step, rows=rows[0]) if rows else None
        if torch.is_grad_enabled():
            output = ctx.again(x, None if means is None else BlockStandIns(means, x.head_dim))
            found = torch.autograd.grad(output, given, gradient, create_graph=True)
        else:
            found = _backward(x, ctx.graph.columns, means, gradient)
        return (*found, *([None] * (8 - len(found))))


def _backward(x: Inputs, columns: Columns, means: ByStep | None, gradient: Tensor) -> tuple[Tensor, ...]:
    x = replace(x, query=dense(x.query), key=dense(x.key), value=dense(x.value))
    given = (x.query, x.key, x.value, *(() if means is None else (means.rows,)))
    found = [torch.zeros(rows.shape, dtype=torch.float32) for rows in given]
    gradient = dense(gradient.to(x.query.dtype))
    problem, _alive = compiled.blocks(x, columns, means, gradient)
    held = pointers(dict(zip(("query", "key", "value", "means"), found, strict=False)))
    call("fewkeys_attend_back", _Gradients(of=problem, out=Rows.of(gradient), **held), x.query.dtype)
    return tuple(part.to(rows.dtype) for part, rows in zip(found, given, strict=True))
