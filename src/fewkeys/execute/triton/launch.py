"""Plans by Triton's kernels: softmax of a band, one shared list and stand-ins, in one pass over the queries.

Graphs with groups have kernels of their own (`launch_grouped`). Experimental, as all of this folder.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor

from fewkeys.core.graph import Graph
from fewkeys.core.inputs import Inputs
from fewkeys.core.weights import Softmax
from fewkeys.execute.operands import listed
from fewkeys.execute.problem import Problem
from fewkeys.execute.triton import launch_grouped
from fewkeys.rest.base import BlockStandIns, NodeStandIns, RangeStandIns, StandIns

LARGEST_HEAD = 256
LARGEST_RANK = 64


def unsupported(problem: Problem) -> str | None:
    """Why `attend` cannot answer, to follow "impl='triton':"; None where it can."""
    x, graph, stand_ins = problem.inputs, problem.graph, problem.stand_ins
    if x.bias is not None:
        return "expected no distance_bias, got one"
    if graph.groups is not None:
        if (reason := launch_grouped.unsupported(problem)) is not None:
            return reason
    elif not isinstance(problem.weights, Softmax):
        return f"expected Softmax() weights, got {problem.weights}"
    if graph.descent is not None or isinstance(stand_ins, (NodeStandIns, RangeStandIns)):
        return "expected a band and shared keys, got keys that each query finds for itself"
    if graph.rows is not None or graph.full:
        return "expected a band and shared keys, got a list of keys for every query"
    if graph.columns is not None and graph.columns.blocks > 1:
        return "expected one list of shared keys, got a list for every block of queries"
    if isinstance(stand_ins, BlockStandIns):
        return "expected stand-ins that serve all queries, got some for every block of queries"
    if stand_ins is not None and (reason := _odd(stand_ins)):
        return reason
    if x.query.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return f"expected float32, bfloat16 or float16, got {x.query.dtype}"
    if max(x.head_dim, x.value_dim) > LARGEST_HEAD:
        return f"expected heads of at most {LARGEST_HEAD} dimensions, got {max(x.head_dim, x.value_dim)}"
    return _missing(x.query.device)


def _odd(stand_ins: StandIns) -> str | None:
    if stand_ins.curvature is not None:
        return "expected stand-ins without curvature, got Moments()"
    if stand_ins.left is not None and (stand_ins.right is None or stand_ins.factor is None):
        return "expected a first-order term of low rank, got a full one"
    if stand_ins.left is not None and stand_ins.left.shape[-1] > LARGEST_RANK:
        return f"expected a first-order term of rank {LARGEST_RANK} or less, got {stand_ins.left.shape[-1]}"
    return None


def _missing(device: torch.device) -> str | None:
    try:
        import triton
    except ImportError:
        return "Triton is not installed; pip install triton"
    if device.type != "cuda" and not triton.knobs.runtime.interpret:
        return f"expected tensors on a CUDA device, got {device.type}; TRITON_INTERPRET=1 emulates one, slowly"
    return None


def attend(problem: Problem) -> Tensor:
    """The output (B, Hq, Nq, Dv), equal to `reference.attend` up to rounding, for what `unsupported` lets pass.

    Products are taken in the input's dtype and summed in float32; stand-ins are rounded to the input's dtype first.
    Second derivatives do not exist. Cost O(n (slots + block) (D + Dv)), of which nothing but the output is stored.
    """
    x, graph = problem.inputs, problem.graph
    if graph.groups is not None:
        return launch_grouped.attend(problem)
    hidden = None if graph.band is None else graph.hidden
    from fewkeys.execute.triton.op import near_heavy_means

    # An empty band ends before it begins, for every query.
    left, right = (0, -x.queries) if graph.band is None else graph.band
    reach = x.keys + x.queries + x.offset
    tensors = (x.query, x.key, x.value, hidden, *_listed(x, graph))
    means = _means(x, cast("StandIns | None", problem.stand_ins))
    numbers = (x.scale, min(left, reach), min(right, reach), x.offset, x.is_causal)
    return near_heavy_means(*tensors, *means, *numbers)[0]


def _listed(x: Inputs, graph: Graph) -> tuple[Tensor | None, ...]:
    if graph.columns is None:
        return None, None, None
    key, value, place = listed(x, graph)
    return key, value, place.to(torch.int32)


def _means(x: Inputs, stand_ins: StandIns | None) -> tuple[Tensor | None, ...]:
    """Key, value, bias, total, label, share, left, right, factor and bounds of the stand-ins.

    The shares of every stand-in are divided by their largest, which goes to the bias: the kernel counts in float16.
    """
    if stand_ins is None:
        return (None,) * 10
    dtype = x.query.dtype

    def rounded(tensor: Tensor | None) -> Tensor | None:
        return None if tensor is None else tensor.to(dtype)

    label, share = stand_ins.label, stand_ins.share.float()
    if stand_ins.mass is not None:  # no key is looked up
        label = torch.zeros((*share.shape[:2], x.keys), dtype=torch.int64, device=share.device)
        share = torch.zeros_like(label, dtype=torch.float32)
    peak = share.new_zeros(stand_ins.total.shape).scatter_reduce_(-1, label, share, "amax")
    peak = torch.where(peak > 0, peak, 1.0)
    bias = peak.log() if stand_ins.bias is None else stand_ins.bias.float() + peak.log()
    numbers = (None if part is None else part.float() for part in (stand_ins.factor, stand_ins.bounds))
    first_order = (rounded(stand_ins.left), rounded(stand_ins.right), *numbers)
    counts = (stand_ins.total.float() / peak, label.to(torch.int32), share / peak.gather(-1, label))
    return rounded(stand_ins.key), rounded(stand_ins.value), bias, *counts, *first_order
