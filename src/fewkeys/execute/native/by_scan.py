"""Softmax over the keys that every query chooses by their codes, by the compiled kernel (`native/scan_attend.h`)."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from fewkeys.execute.problem import Problem
from fewkeys.execute.torch import by_scan
from fewkeys.native.build import call
from fewkeys.native.codes import LARGEST_CODED, scan
from fewkeys.native.tensors import Rows, dense, pointers, struct
from fewkeys.rest.base import RangeStandIns
from fewkeys.select.key_scan import Scanned
from fewkeys.sketch.codes import BLOCK


def form(problem: Problem) -> str | None:
    """Why there is no kernel for a scan of this form, None where there is."""
    if not by_scan.knows(problem):
        return "expected keys that each query finds by their codes alone, got others beside them"
    if problem.inputs.head_dim > LARGEST_CODED:
        return f"expected heads of at most {LARGEST_CODED} dimensions, got {problem.inputs.head_dim}"
    if problem.stand_ins is not None and not isinstance(problem.stand_ins, RangeStandIns):
        return f"expected means of ranges to stand in, or nothing, got {type(problem.stand_ins).__name__}"
    return None


def is_rounded(problem: Problem) -> bool:
    """Whether keys and values are held in int8, with scales."""
    return isinstance(problem.graph.scan, Scanned) and problem.graph.scan.scale is not None


def read(problem: Problem) -> list[Tensor]:
    """What the kernel reads that may depend on the inputs."""
    x = problem.inputs
    return [x.query, x.key, x.value, *parts(problem)]


def parts(problem: Problem) -> tuple[Tensor, ...]:
    """What carries gradients, beside queries, keys and values."""
    s = problem.stand_ins
    return (s.key, s.value) if isinstance(s, RangeStandIns) else ()


def attend(problem: Problem) -> Tensor:
    """The output (B, Hq, Nq, Dv), equal to `reference.attend` up to rounding; the keys chosen are the same.

    Every query chooses as it goes: nothing but the output is stored. Cost O(n slots (D + Dv)) beside the scan.
    """
    x, found, s = problem.inputs, problem.graph.scan, problem.stand_ins
    if not isinstance(found, Scanned):
        raise ValueError("graph: expected what a scan found, got another")
    query, key, value = (dense(rows) for rows in (x.query, x.key, x.value))
    output = query.new_empty((*query.shape[:3], x.value_dim))
    of, _alive = scan(found.codes.packed, found.codes.sigma, found.query, found.seen, x.valid, found.most)
    of.keys = x.keys
    held: dict[str, Tensor] = {}
    numbers: dict[str, Any] = {"steps": 1, "means": 0}
    if isinstance(s, RangeStandIns):
        held = {"mean_key": s.key.float(), "mean_value": s.value.float(), "size": s.size.float(), "edges": s.edges}
        held = {name: part.contiguous() for name, part in held.items()}
        numbers = {"steps": s.key.shape[2], "means": s.count}
    rows = {"query": query, "key": key, "value": value, "out": output}
    if found.scale is not None:
        rows["scales"] = found.scale
    told = struct("ScanAttend")(
        of=of,
        **{name: Rows.of(tensor) for name, tensor in rows.items()},
        **pointers(held),
        **numbers,
        value_dim=x.value_dim,
        offset=x.offset,
        causal=x.is_causal,
        block=BLOCK,
        scale=x.scale,
    )
    call("fewkeys_scan_attend", told, x.query.dtype)
    return output
