"""Plans by the compiled kernels for the CPU: forward and, if gradients are needed, backward."""

from __future__ import annotations

from torch import Tensor

from fewkeys.core.impl import COMPILED
from fewkeys.core.weights import Softmax
from fewkeys.execute.native import backward, by_scan, forward
from fewkeys.execute.problem import Problem
from fewkeys.native.build import missing
from fewkeys.native.tensors import DTYPES, placed, readable, wants_gradient
from fewkeys.rest.base import BlockStandIns, CohortStandIns, StandIns

__all__ = ["attend", "repeated", "unsupported"]


def unsupported(problem: Problem) -> str | None:
    """Why `attend` cannot answer, to follow "impl='native':"; None where it can. Reads no data."""
    x = problem.inputs
    if x.bias is not None:
        return "expected no distance_bias, got one"
    if (reason := _form(problem)) is not None:
        return reason
    rounded = by_scan.is_rounded(problem)
    if any(rows.dtype not in DTYPES for rows in ((x.query,) if rounded else (x.query, x.key, x.value))):
        return f"expected float32 or bfloat16, got {x.query.dtype}"
    if not rounded and not x.query.dtype == x.key.dtype == x.value.dtype:
        return f"expected query, key and value of one dtype, got {x.query.dtype}, {x.key.dtype} and {x.value.dtype}"
    if x.query.device.type != "cpu":
        return f"expected tensors on the CPU, got {x.query.device.type}"
    if (reason := missing()) is not None:
        return f"expected compiled kernels, got none ({reason})"
    s = problem.stand_ins
    if problem.graph.scan is not None:
        plain = placed(*by_scan.read(problem))
    elif isinstance(s, BlockStandIns):
        plain = readable(x.query, x.key, x.value, s.states.rows)
    else:
        plain = readable(x.query, x.key, x.value, *forward.read(s))
    if not plain:
        return "expected plain tensors, got some that torch.func or forward-mode derivatives follow"
    # Plans take these for constants, and so do the kernels.
    if isinstance(s, StandIns | CohortStandIns) and wants_gradient(s.bias, s.factor, s.right):
        return "expected constants beside the stand-ins' means, got a bias, factor or basis that requires gradients"
    return None


def attend(problem: Problem) -> Tensor:
    """The output (B, Hq, Nq, Dv), for problems that `unsupported` accepts: by `forward` or `backward`."""
    if not _wants_gradient(problem):
        return forward.attend(problem)
    return backward.attend(problem)


def repeated(problem: Problem) -> by_scan.ScanCall | None:
    """The arguments of a scan, for the problem and for later tokens; None where no kernel reads such a problem."""
    is_scan = problem.graph.scan is not None and problem.inputs.impl in COMPILED
    return by_scan.ScanCall(problem) if is_scan and unsupported(problem) is None else None


def _form(problem: Problem) -> str | None:
    """Why there is no kernel of this form, None where there is."""
    graph, s = problem.graph, problem.stand_ins
    if not isinstance(problem.weights, Softmax):
        return f"expected Softmax() weights, got {problem.weights}"
    if graph.scan is not None:
        return by_scan.form(problem)
    if graph.rows is not None or graph.full:
        return "expected a band and lists that blocks of queries share, got a list of keys for every query"
    if graph.extra is not None:
        return "expected a band and lists that blocks of queries share, got extra edges"
    if problem.by_block:
        if graph.band is not None or graph.columns is None:
            return f"expected lists by blocks alone, got {'none' if graph.columns is None else 'a window beside them'}"
        if isinstance(s, StandIns):
            return "expected means of the past beside lists by blocks, got stand-ins that serve all queries"
    return None


def _wants_gradient(problem: Problem) -> bool:
    x, s = problem.inputs, problem.stand_ins
    if problem.graph.scan is not None:
        return wants_gradient(*by_scan.read(problem))
    if not isinstance(s, BlockStandIns):
        return wants_gradient(x.query, x.key, x.value, *forward.read(s))
    return wants_gradient(x.query, x.key, x.value, s.states.rows)
