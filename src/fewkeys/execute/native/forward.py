"""Softmax attention by the compiled kernels: lists and stand-ins of cohorts, and a band (`native/near_cohorts.h`)."""

from typing import cast

from torch import Tensor

from fewkeys.execute.native import by_scan
from fewkeys.execute.problem import Problem
from fewkeys.native.build import call
from fewkeys.native.tensors import STRUCTS, sized
from fewkeys.rest.base import StandIns


def attend(problem: Problem) -> Tensor:
    """The output (B, Hq, Nq, Dv). Scores and sums are float32.

    Cost O(n (slots + tile) (D + Dv)); nothing but the output is stored.
    """
    x, graph, s = problem.inputs, problem.graph, cast("StandIns | None", problem.stand_ins)
    if graph.scan is not None:
        return by_scan.ScanCall(problem).attend(x.query, x.keys, x.offset)
    columns = graph.columns
    # Kernels of cohorts do not write padded queries.
    make = x.value.new_zeros if problem.by_cohort and x.valid_queries is not None else x.value.new_empty
    output = make((*x.query.shape[:3], x.value_dim))
    tensors = {} if s is None else _tensors(s)
    blocks, queries = 1, x.gqa_ratio * x.queries
    if columns is not None:
        tensors |= {"place": columns.index, "used": columns.used, "order": columns.place}
        blocks, queries = columns.blocks, queries if columns.place is None else columns.place.shape[3]
    sizes = {"heads": x.batch * x.kv_heads * blocks, "cohorts": blocks, "queries": queries}
    sizes |= {"asking": x.gqa_ratio, "asked": x.queries, "entries": 0 if columns is None else columns.index.shape[3]}
    reach = x.keys + x.queries + x.offset
    # An empty band ends before it begins, for every query.
    left, right = (0, -reach) if graph.band is None else graph.band
    args = STRUCTS["Near"](
        **sized(x.key, x.value) | sizes,
        **tensors,
        query=x.query,
        out=output,
        real=x.valid,
        offset=x.offset,
        causal=x.is_causal,
        scale=x.scale,
        means=0 if s is None else s.count,
        rank=0 if s is None or s.left is None else s.left.shape[-1],
        left=min(left, reach),
        right=min(right, reach),
    )
    call("fewkeys_attend", args, x.query.dtype)
    return output


def _tensors(s: StandIns) -> dict[str, Tensor | None]:
    """The tensors of stand-ins, by their names in the kernels' arguments."""
    numbers = {"mean_key": s.key, "mean_value": s.value, "left_factor": s.left, "right_factor": s.right}
    numbers |= {"bias": s.bias, "factor": s.factor, "bounds": s.bounds, "total": s.mass, "size": s.size}
    return {"label": s.label} | {name: part if part is None else part.float() for name, part in numbers.items()}
