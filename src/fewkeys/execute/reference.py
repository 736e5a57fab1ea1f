"""The plan as its definition says, on dense matrices: the oracle of every test.

All queries meet all keys under the graph's mask, the stand-ins are further columns, and the multiplicity of a
stand-in is counted from the mask. float32, or float64 for float64 input, whatever the other dtypes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fewkeys.core.graph import Graph
from fewkeys.core.inputs import Inputs
from fewkeys.core.precision import working
from fewkeys.core.weights import Softmax, Weights, positive
from fewkeys.rest.base import BlockStandIns, StandIns


def attend(
    inputs: Inputs, graph: Graph, stand_ins: StandIns | BlockStandIns | None, weights: Weights, block: int = 0
) -> Tensor:
    """The output (B, Hq, Nq, Dv). `block` > 0 takes so many queries at a time, which bounds the memory."""
    step = block or inputs.queries
    blocks = [
        _attend_block(inputs, graph, stand_ins, weights, start, min(start + step, inputs.queries))
        for start in range(0, inputs.queries, step)
    ]
    return torch.cat(blocks, 2).to(inputs.query.dtype)


def _attend_block(
    inputs: Inputs, graph: Graph, stand_ins: StandIns | BlockStandIns | None, weights: Weights, start: int, stop: int
) -> Tensor:
    def per_query_head(tensor: Tensor) -> Tensor:
        return working(tensor).repeat_interleave(inputs.groups, 1)

    query = working(inputs.query[:, :, start:stop]) * inputs.scale
    kept = graph.mask(start, stop)
    scores = (query @ per_query_head(inputs.key).mT).masked_fill(~kept, -torch.inf)
    value = per_query_head(inputs.value)
    if stand_ins is None:
        (weight,) = weights.kernel([scores])
        return (weight @ value) / positive(weight.sum(-1, keepdim=True))
    if isinstance(stand_ins, BlockStandIns):
        first = torch.zeros(stop - start, dtype=torch.int64, device=query.device)
        block = first if graph.columns is None else graph.columns.block(inputs, start, stop)
        parts = (stand_ins.key, stand_ins.value, stand_ins.bias, stand_ins.size)
        return _beside_means(query, scores, value, [per_query_head(part)[:, :, block] for part in parts], weights)

    extra = query @ per_query_head(stand_ins.key).mT
    if stand_ins.bias is not None:
        extra = extra + per_query_head(stand_ins.bias).unsqueeze(-2)
    if stand_ins.curvature is not None:
        extra = extra + 0.5 * ((query @ per_query_head(stand_ins.curvature)) * query).sum(-1, keepdim=True)
    multiplicity = (~kept).to(query.dtype) @ per_query_head(stand_ins.member)
    extra = extra.masked_fill(multiplicity <= 0, -torch.inf)
    weight, weight_extra = weights.kernel([scores, extra])
    weight_extra = weight_extra * multiplicity
    total = weight.sum(-1, keepdim=True) + weight_extra.sum(-1, keepdim=True)
    output = weight @ value + weight_extra @ per_query_head(stand_ins.value)
    if stand_ins.left is not None and stand_ins.factor is not None:
        moved = query @ per_query_head(stand_ins.left)
        if stand_ins.right is not None:
            moved = moved @ per_query_head(stand_ins.right)
        output = output + (weight_extra @ per_query_head(stand_ins.factor).unsqueeze(-1)) * moved
    return output / positive(total)


def _beside_means(query: Tensor, scores: Tensor, value: Tensor, means: Sequence[Tensor], weights: Weights) -> Tensor:
    """Kept keys beside each query's own stand-ins of the past: their keys, values, biases and sizes."""
    key, mean, bias, size = means
    extra = (query.unsqueeze(-2) @ key.mT).squeeze(-2)
    tilted = isinstance(weights, Softmax)
    extra = (extra + bias if tilted else extra).masked_fill(size == 0, -torch.inf)
    weight, weight_extra = weights.kernel([scores, extra])
    weight_extra = weight_extra if tilted else weight_extra * size
    total = weight.sum(-1, keepdim=True) + weight_extra.sum(-1, keepdim=True)
    return (weight @ value + (weight_extra.unsqueeze(-2) @ mean).squeeze(-2)) / positive(total)


def attend_exact(inputs: Inputs, weights: Weights) -> Tensor:
    """Every query attends to every key it may see."""
    return attend(inputs, Graph(inputs, full=True), None, weights)
