"""Softmax over the keys that every query chooses by their codes, by the compiled kernel (`native/scan_attend.h`)."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from fewkeys.execute.problem import Problem
from fewkeys.execute.torch import by_scan
from fewkeys.native.build import call
from fewkeys.native.codes import LARGEST_CODED, scan
from fewkeys.native.tensors import Rows, dense, struct
from fewkeys.rest.base import RangeStandIns
from fewkeys.select.key_scan import Scanned


def form(problem: Problem) -> str | None:
    """Why there is no kernel for a scan of this form, None where there is."""
    if by_scan.only_scan(problem.graph) is None:
        return "expected keys that each query finds by their codes alone, got others beside them"
    if problem.inputs.head_dim > LARGEST_CODED:
        return f"expected heads of at most {LARGEST_CODED} dimensions, got {problem.inputs.head_dim}"
    if problem.stand_ins is not None and not isinstance(problem.stand_ins, RangeStandIns):
        return f"expected means of ranges to stand in, or nothing, got {type(problem.stand_ins).__name__}"
    return None


def is_rounded(problem: Problem) -> bool:
    """Whether keys and values are held in int8, with scales."""
    return isinstance(problem.graph.scan, Scanned) and problem.graph.scan.scale is not None


def attend(problem: Problem) -> Tensor:
    """The output (B, Hq, Nq, Dv), equal to `reference.attend` up to rounding; the keys chosen are the same.

    Every query chooses as it goes: nothing but the output is stored. Cost O(n slots (D + Dv)) beside the scan.
    """
    x = problem.inputs
    return ScanCall(problem).attend(x.query, x.keys, x.offset)


class ScanCall:
    """The kernel's arguments for a problem, and the tensors that they point to.

    They serve later tokens, too, as long as the own block of the queries stays the same: their keys and values stand
    behind those of the problem, in the same memory, and nothing else that the kernel reads changes.
    """

    def __init__(self, problem: Problem) -> None:
        x, scanned, s = problem.inputs, problem.graph.scan, problem.stand_ins
        if not isinstance(scanned, Scanned):
            raise ValueError("graph: expected the keys of a scan, got others")
        query, key, value = (dense(rows) for rows in (x.query, x.key, x.value))
        codes = scanned.codes
        of, alive = scan(codes.packed, codes.sigma, query, scanned.sign, scanned.seen, x.valid, scanned.most)
        arrays: dict[str, Tensor | None] = {}
        means: dict[str, Any] = {"steps": 1}
        if isinstance(s, RangeStandIns):
            reals = None if s.reals is None else s.reals.contiguous()
            arrays = {"size": reals, "edges": s.edges.contiguous()}
            total = Rows.of(dense(s.totals))
            means = {"total": total, "steps": len(s.edges), "means": s.count, "blocks": s.totals.shape[2] - 1}
        rows = {"key": key, "value": value}
        if scanned.scale is not None:
            rows["scales"] = scanned.scale
        self._arguments = struct("ScanAttend")(
            of=of,
            **{name: Rows.of(tensor) for name, tensor in rows.items()},
            **arrays,
            **means,
            value_dim=x.value_dim,
            causal=x.is_causal,
            scale=x.scale,
        )
        self._alive = (alive, key, value, scanned.scale, arrays, s)

    def attend(self, query: Tensor, keys: int, offset: int) -> Tensor:
        """The output for queries (B, Hq, Nq, D), the first of which stands at place `offset` of so many keys."""
        query, arguments = dense(query), self._arguments
        output = query.new_empty((*query.shape[:3], arguments.value_dim))
        arguments.of.query, arguments.out = Rows.of(query), Rows.of(output)
        arguments.of.keys, arguments.offset = keys, offset
        call("fewkeys_scan_attend", arguments, query.dtype)
        return output
