"""Plans by the compiled kernels for the CPU: forward and, if gradients are needed, backward."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fewkeys.core.derivatives import recomputed
from fewkeys.core.weights import Softmax
from fewkeys.execute import torch as by_torch
from fewkeys.execute.native import by_scan, forward
from fewkeys.execute.problem import Problem
from fewkeys.native.build import missing
from fewkeys.native.tensors import DTYPES, placed
from fewkeys.rest.base import BlockStandIns, StandIns

__all__ = ["attend", "unsupported"]


def unsupported(problem: Problem) -> str | None:
    """Why `attend` cannot answer, to follow "impl='native':"; None where it can. Reads no data."""
    x, graph = problem.inputs, problem.graph
    if x.bias is not None:
        return "expected no distance_bias, got one"
    if not isinstance(problem.weights, Softmax):
        return f"expected Softmax() weights, got {problem.weights}"
    if graph.scan is not None and (reason := by_scan.form(problem)) is not None:
        return reason
    if graph.rows is not None or graph.extra is not None:
        return "expected a band and lists that queries share, got a list of keys for every query, or extra edges"
    columns = None if problem.by_cohort else graph.columns
    if isinstance(problem.stand_ins, BlockStandIns) or (columns is not None and columns.blocks > 1):
        return "expected a band and lists that all queries or cohorts share, got lists by blocks"
    rounded = graph.scan is not None and graph.scan.scale is not None  # int8 keys and values, with scales
    dtypes = dict.fromkeys(rows.dtype for rows in ((x.query,) if rounded else (x.query, x.key, x.value)))
    if len(dtypes) > 1 or x.query.dtype not in DTYPES:
        return f"expected float32 or bfloat16, got {' and '.join(map(str, dtypes))}"
    if x.query.device.type != "cpu":
        return f"expected tensors on the CPU, got {x.query.device.type}"
    if (reason := missing()) is not None:
        return f"expected compiled kernels, got none ({reason})"
    # The sums of ranges, which are float64, do not count: kernels read means.
    s = vars(problem.stand_ins) if isinstance(problem.stand_ins, StandIns) else {}
    if not placed(x.query, x.key, x.value, *(part for part in s.values() if isinstance(part, Tensor))):
        return "expected plain tensors that neither torch.func nor forward derivatives follow, got others"
    return None


def attend(problem: Problem) -> Tensor:
    """The output (B, Hq, Nq, Dv), for problems that `unsupported` accepts. Gradients are those of torch's operations,
    which compute the weights again in the backward pass: only the inputs and the stand-ins are stored.
    """
    if not torch.is_grad_enabled():
        return forward.attend(problem)
    x, s = problem.inputs, problem.stand_ins
    rows: dict[str, Any] = {name: getattr(x, name) for name in ("query", "key", "value")}
    tensors = rows if s is None else rows | s.tensors("rest")
    followed = {name: part for name, part in tensors.items() if part.requires_grad}
    if not followed:
        return forward.attend(problem)

    def computed(*leaves: Tensor) -> tuple[Tensor]:
        copies = tensors | dict(zip(followed, leaves, strict=True))
        inputs = replace(x, **{name: copies[name] for name in rows})
        stand_ins = None if s is None else s.with_tensors(copies, "rest")
        return (by_torch.attend(replace(problem, inputs=inputs, stand_ins=stand_ins)),)

    output: Tensor = recomputed(lambda *_: forward.attend(problem), computed, *followed.values())
    return output
