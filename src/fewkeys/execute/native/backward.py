"""Softmax attention with gradients: compiled kernels in both directions.

`native/near_back.h`: a band, one shared list and stand-ins. Other gradients are those of torch's operations.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor

from fewkeys.core.derivatives import gradients_by_torch
from fewkeys.core.graph import Graph
from fewkeys.core.inputs import Inputs
from fewkeys.execute import torch as by_torch
from fewkeys.execute.native import by_scan, forward
from fewkeys.execute.problem import Problem
from fewkeys.native.build import call
from fewkeys.native.tensors import Rows, dense, round_up, struct
from fewkeys.rest.base import BlockStandIns, CohortStandIns, RangeStandIns, StandIns


def attend(problem: Problem) -> Tensor:
    """`forward.attend` with gradients of queries, keys, values and the stand-ins' means.

    With weights P, values v and the gradient g of the output, the scores have the gradient
    `P (g v^T - rowsum(P g v^T))`; the weights are made again from the inputs, so nothing but these is kept. Derivatives
    of the gradients go through torch's operations. Cost 5/2 that of the output.
    """
    x = problem.inputs
    output: Tensor = _Attended.apply(problem, x.query, x.key, x.value, *_parts(problem))  # type: ignore[no-untyped-call]
    return output


def _parts(problem: Problem) -> tuple[Tensor, ...]:
    """The tensors of the stand-ins that carry gradients."""
    stand_ins = problem.stand_ins
    if problem.graph.scan is not None:
        return by_scan.parts(problem)
    if isinstance(stand_ins, BlockStandIns):
        return (stand_ins.states.rows,)
    if not isinstance(stand_ins, StandIns | CohortStandIns):
        return ()
    left = () if stand_ins.left is None else (stand_ins.left,)
    return (stand_ins.key, stand_ins.value, *left)


def _of(problem: Problem, query: Tensor, key: Tensor, value: Tensor, *parts: Tensor) -> Problem:
    """The same problem of these tensors."""
    x, s = replace(problem.inputs, query=query, key=key, value=value), problem.stand_ins
    if isinstance(s, RangeStandIns):
        s = replace(s, totals=parts[0])
    elif isinstance(s, BlockStandIns):
        s = BlockStandIns(replace(s.states, rows=parts[0]), s.head_dim)
    elif isinstance(s, StandIns | CohortStandIns):
        s = replace(s, key=parts[0], value=parts[1], left=parts[2] if parts[2:] else None)
    return replace(problem, inputs=x, stand_ins=s)


class _Attended(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, problem: Problem, *tensors: Tensor) -> Tensor:
        ctx.save_for_backward(*tensors)
        ctx.problem = problem
        return forward.attend(problem)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        tensors, problem = ctx.saved_tensors, ctx.problem
        others = problem.by_block or problem.by_cohort or problem.graph.scan is not None
        if torch.is_grad_enabled() or others:
            return None, *gradients_by_torch(lambda *rows: [by_torch.attend(_of(problem, *rows))], tensors, [gradient])
        problem = _of(problem, *tensors)
        x = problem.inputs
        x = replace(x, query=dense(x.query), key=dense(x.key), value=dense(x.value))
        stand_ins = cast("StandIns | None", problem.stand_ins)
        gradients = _near_back(x, problem.graph, stand_ins, dense(gradient.to(x.query.dtype)))
        return None, *(part.to(rows.dtype) for part, rows in zip(gradients, tensors, strict=True))


def _near_back(x: Inputs, graph: Graph, stand_ins: StandIns | None, gradient: Tensor) -> Sequence[Tensor]:
    query, key, value = direct = [rows.new_zeros(rows.shape, dtype=torch.float32) for rows in (x.query, x.key, x.value)]
    args, _alive = forward.near(x, graph, stand_ins, gradient)
    sizes = [args.entries, args.means, args.rank]
    shared = [key.new_zeros((*key.shape[:2], sum(sizes), dim)) for dim in (x.head_dim, round_up(x.value_dim))]
    names = ("query", "key", "value", "shared_key", "shared_value")
    addresses = dict(zip(names, (*direct, *shared), strict=True))
    call("fewkeys_attend_back", struct("NearBack")(of=args, out=Rows.of(gradient), **addresses), x.query.dtype)
    list_key, mean_key, left = shared[0].split(sizes, 2)
    list_value, mean_value, _ = shared[1][..., : x.value_dim].split(sizes, 2)
    if graph.columns is not None:
        # Placeholders in the list have no weight, so their gradients are zero.
        index = graph.columns.index.squeeze(2).unsqueeze(-1)
        for gradient_of, rows in ((key, list_key), (value, list_value)):
            gradient_of.scatter_add_(2, index.expand_as(rows), rows)
    if stand_ins is None:
        return direct
    return (query, key, value, mean_key, mean_value, *(() if stand_ins.left is None else (left.mT,)))
