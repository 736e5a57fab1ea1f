"""Softmax over the keys that every query chooses by their codes, by the compiled kernel (`native/scan_attend.h`)."""

import torch
from torch import Tensor

from fewkeys.core.extent import needs_rescaling
from fewkeys.execute.problem import Problem
from fewkeys.execute.torch import by_scan
from fewkeys.native.build import call
from fewkeys.native.kernels import LARGEST_CODED, scan
from fewkeys.native.tensors import STRUCTS, Rows, dense
from fewkeys.rest.base import RangeStandIns

SMALL = 1024.0
"""The largest magnitude in tokens that a kernel stores. With usual scales, such numbers need no rescaling."""


def form(problem: Problem) -> str | None:
    """Why there is no kernel for such a scan; None where there is."""
    if by_scan.only_scan(problem.graph) is None:
        return "expected keys that each query finds by their codes alone, got others beside them"
    if problem.inputs.head_dim > LARGEST_CODED:
        return f"expected heads of at most {LARGEST_CODED} dimensions, got {problem.inputs.head_dim}"
    if problem.stand_ins is not None and not isinstance(problem.stand_ins, RangeStandIns):
        return f"expected means of ranges to stand in, or nothing, got {type(problem.stand_ins).__name__}"
    return None


class ScanCall:
    """The kernel's arguments for a problem, and the tensors that they point to.

    They also serve later tokens of the same unfinished block, whose keys and values follow those of the problem in the
    same memory: nothing else that the kernel reads changes.
    """

    def __init__(self, problem: Problem) -> None:
        x, s, scanned = problem.inputs, problem.stand_ins, problem.graph.scan
        codes = scanned.codes
        means: dict[str, Tensor | int | None] = {"steps": 1}
        if isinstance(s, RangeStandIns):
            means = {"steps": len(s.edges), "means": s.count, "blocks": s.totals.shape[2] - 1}
            means |= {"total": s.totals, "size": s.reals, "edges": s.edges}
        self._args = STRUCTS["ScanAttend"](
            of=scan(codes.packed, codes.sigma, x.query, scanned.sign, scanned.seen, x.valid, scanned.most),
            **means,
            key=x.key,
            value=x.value,
            scales=scanned.scale,
            value_dim=x.value_dim,
            causal=x.is_causal,
            scale=x.scale,
            limit=0.0 if needs_rescaling((SMALL,) * 3, x.scale, x.head_dim, torch.float32) else SMALL,
        )

    def attend(self, query: Tensor, keys: int, offset: int, token: tuple[Tensor, Tensor] | None = None) -> Tensor:
        """The output for queries (B, Hq, Nq, D), the first of which stands at place `offset` of so many keys.

        token: key (B, Hkv, 1, D) and value (B, Hkv, 1, Dv) of the only query, for the kernel to store behind earlier
        ones. If a magnitude exceeds `SMALL`, or inputs of that size may need rescaling, it raises `LargeError` instead.
        """
        query, args = dense(query), self._args
        output = query.new_empty((*query.shape[:3], args.value_dim))
        new = (None, None) if token is None else (dense(token[0]), dense(token[1]))
        args.new_key, args.new_value = (Rows() if rows is None else Rows.of(rows) for rows in new)
        args.of.query, args.out = Rows.of(query), Rows.of(output)
        args.of.keys, args.offset = keys, offset
        call("fewkeys_scan_attend", args, query.dtype)
        return output
