"""Softmax attention in one pass over the queries, by the compiled kernels.

`native/near.h`: a band, one shared list and stand-ins; `native/near_cohorts.h`: lists and stand-ins of cohorts, and a
band.
"""

from __future__ import annotations

from dataclasses import replace
from typing import cast

from torch import Tensor

from fewkeys.core.graph import Graph
from fewkeys.core.inputs import Inputs
from fewkeys.execute.native import by_scan
from fewkeys.execute.problem import Problem
from fewkeys.native.build import call
from fewkeys.native.tensors import KernelArgs, Rows, dense, struct
from fewkeys.rest.base import CohortStandIns, StandIns


def attend(problem: Problem) -> Tensor:
    """The output (B, Hq, Nq, Dv), equal to `reference.attend` up to rounding.

    Scores and sums are float32 whatever the input's dtype. Cost O(n (slots + tile) (D + Dv)); nothing but the output is
    stored.
    """
    inputs, graph, stand_ins = problem.inputs, problem.graph, problem.stand_ins
    if graph.scan is not None:
        return by_scan.attend(problem)
    query, key, value = (dense(rows) for rows in (inputs.query, inputs.key, inputs.value))
    x = replace(inputs, query=query, key=key, value=value)
    # Kernels of cohorts do not write padded queries.
    make = value.new_zeros if problem.by_cohort and x.valid_queries is not None else value.new_empty
    output = make((*query.shape[:3], x.value_dim))
    args = _near(x, graph, cast("StandIns | CohortStandIns | None", stand_ins), output)
    call("fewkeys_attend", args, x.query.dtype)
    return output


def _near(x: Inputs, graph: Graph, s: StandIns | CohortStandIns | None, output: Tensor) -> KernelArgs:
    columns = graph.columns
    tensors: dict[str, Tensor | None] = {} if s is None else {**_means(s), "label": s.label}
    tensors = {name: part if part is None or name == "label" else part.float() for name, part in tensors.items()}
    tensors["hidden"] = None if graph.band is None else graph.hidden
    rows = {"query": x.query, "key": x.key, "value": x.value, "out": output}
    sizes = {"heads": x.query_heads, "gqa_ratio": x.gqa_ratio, "queries": x.queries, "cohorts": 1}
    if columns is not None:
        tensors |= {"place": columns.index, "used": columns.used}
        if columns.place is not None:
            tensors["order"] = columns.place
            sizes |= {"heads": x.kv_heads * columns.blocks, "gqa_ratio": 1, "queries": columns.place.shape[3]}
            sizes |= {"cohorts": columns.blocks, "asking": x.gqa_ratio, "asked": x.queries}
    reach = x.keys + x.queries + x.offset
    # An empty band ends before it begins, for every query.
    left, right = (0, -reach) if graph.band is None else graph.band
    return struct("Near")(
        **{name: Rows.of(tensor) for name, tensor in rows.items()},
        **sizes,
        **tensors,
        batch=x.batch,
        keys=x.keys,
        dim=x.head_dim,
        value_dim=x.value_dim,
        offset=x.offset,
        causal=x.is_causal,
        scale=x.scale,
        entries=0 if columns is None else columns.index.shape[3],
        means=0 if s is None else s.count,
        rank=0 if s is None or s.left is None else s.left.shape[-1],
        left=min(left, reach),
        right=min(right, reach),
    )


def _means(s: StandIns | CohortStandIns) -> dict[str, Tensor | None]:
    """The tensors of stand-ins, by their names in the kernels' arguments."""
    tensors = {"mean_key": s.key, "mean_value": s.value, "left_factor": s.left, "right_factor": s.right}
    tensors |= {"factor": s.factor, "bounds": s.bounds}
    if isinstance(s, CohortStandIns):
        return tensors | {"bias": s.bias, "total": s.mass, "size": s.size}
    bias = s.key.new_zeros(s.key.shape[:3]) if s.bias is None else s.bias
    return tensors | {"bias": bias, "total": s.total, "share": s.share}
