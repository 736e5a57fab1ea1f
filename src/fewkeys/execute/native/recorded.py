"""Kernels of an earlier call, run again for other rows of the same shapes.

Python code between kernels takes 14 % of a call of 1,024 tokens, 9 % of 2,048 (12 heads). Calls of `budget(slots)`
without padding, bias and gradients consist of kernels alone: torch only allocates and views memory. The kernels of the
first call are recorded with their arguments; later calls of the same plan and shapes run them for their own rows.
"""

from __future__ import annotations

import ctypes
from collections.abc import Hashable, Iterator, Sequence
from itertools import combinations
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fewkeys.core.impl import COMPILED
from fewkeys.core.inputs import Inputs
from fewkeys.execute import dispatch
from fewkeys.execute.problem import prepare
from fewkeys.native.build import IndefiniteError, Step, recorded_steps, repeat
from fewkeys.native.tensors import suits
from fewkeys.plan import Plan
from fewkeys.rest import ClusterMeans
from fewkeys.select import Outliers, Window

MOST_BYTES = 2**26
"""The most memory for what the kernels of all recordings write before the output."""
_RULES = {Outliers, Window, ClusterMeans}
"""Rules that read numbers only by kernels and operations of torch."""
_BY_SHAPE = ("aten::arange", "aten::empty_like", "aten::full", "aten::new_empty")
"""Operations whose results depend on shapes alone."""
_recordings: dict[Hashable, Recording] = {}
"""By plan and shapes, the last used ones at the end."""


def attend(inputs: Inputs, plan: Plan, out: Tensor | None = None) -> Tensor:
    """The output (B, Hq, Nq, Dv) of a plan, by recorded kernels if there are any. out: contiguous memory for it that
    these may write.
    """
    x, rows = inputs, (inputs.query, inputs.key, inputs.value)
    is_ours = _RULES.issuperset(map(type, (*plan.parts, plan.rest)))
    if not (is_ours and x.is_fresh and _is_plain(x)):  # statistics of another plan would not be computed again
        return dispatch.attend(prepare(x, plan))
    form = plan, *(part.shape for part in rows), x.scale, x.offset, x.impl
    # Taken out, as its memory is for one thread at a time. No lock: another thread could hold it at a fork.
    if (recording := _recordings.pop(form, None)) is None:
        # Not in the memory of `x`: later calls overwrite these statistics.
        output, recording = _recorded(x.branch(), plan)
        if recording is None:
            return output
    else:
        try:
            output = recording.run(rows, out)
        except IndefiniteError:
            output = dispatch.attend(prepare(x, plan))
    for least_used in list(_recordings):
        if recording.bytes + sum(other.bytes for other in list(_recordings.values())) <= MOST_BYTES:
            break
        _recordings.pop(least_used, None)
    _recordings[form] = recording
    return output


def _is_plain(x: Inputs) -> bool:
    """Whether a call may consist of kernels alone: conditions that take no time to check."""
    rows = x.query, x.key, x.value
    if x.is_causal or x.impl not in COMPILED or not (x.valid is None and x.bias is None and x.shard is None):
        return False
    return suits(*rows) and all(part.dtype == torch.float32 and part.is_contiguous() for part in rows)


def _recorded(x: Inputs, plan: Plan) -> tuple[Tensor, Recording | None]:
    """The output, and the recording if the call can be repeated."""
    with _Watch() as watch, recorded_steps() as steps:  # type: ignore[no-untyped-call]
        output = dispatch.attend(prepare(x, plan))
    rows = x.query, x.key, x.value, output
    spans = [range(part.data_ptr(), part.data_ptr() + part.nbytes) for part in rows]
    are_apart = not any(a.start in b or b.start in a for a, b in combinations(spans, 2))
    if not (watch.is_plain and are_apart and output.is_contiguous()):
        return output, None
    recording = Recording(steps, spans, output)
    return output, recording if recording.bytes <= MOST_BYTES else None


class _Watch(TorchDispatchMode):
    """Notes whether torch only views memory and makes tensors by shapes."""

    is_plain = True

    def __torch_dispatch__(self, function: Any, _types: Any, args: Any = (), options: Any = None) -> Any:
        result = function(*args, **(options or {}))
        self.is_plain &= function.name().split(".")[0] in _BY_SHAPE or (function.is_view and _is_inside(result, args))
        return result


def _is_inside(result: Any, args: Any) -> bool:
    """Whether the result is in the memory of its argument: some views are copies where needed."""
    parts = result if isinstance(result, list | tuple) else [result]
    memory = args[0].untyped_storage().data_ptr()
    return all(part.untyped_storage().data_ptr() == memory for part in parts)


class Recording:
    """The kernels of a call, and which addresses in their arguments are those of its rows and its output."""

    def __init__(self, steps: Sequence[Step], spans: Sequence[range], output: Tensor) -> None:
        self.steps, self.shape = steps, output.shape
        self.moved = [
            (args, name, row, address - span.start)
            for _, step_args, *_ in steps
            for args, name, address in _addresses(step_args)
            for row, span in enumerate(spans)
            if address in span
        ]
        held: dict[int, int] = {}
        for _, args, *_ in steps:
            args.alive = [
                x for x in args.alive if not (isinstance(x, Tensor) and any(x.data_ptr() in span for span in spans))
            ]
            held |= {x.data_ptr(): x.nbytes for x in args.alive if isinstance(x, Tensor)}
        self.bytes = sum(held.values())

    def run(self, rows: Sequence[Tensor], out: Tensor | None = None) -> Tensor:
        output = rows[-1].new_empty(self.shape) if out is None else out
        first = [part.data_ptr() for part in (*rows, output)]
        for args, name, row, offset in self.moved:
            setattr(args, name, first[row] + offset)
        repeat(self.steps)
        return output


def _addresses(args: ctypes.Structure) -> Iterator[tuple[ctypes.Structure, str, int]]:
    """The addresses in a struct, each with the part of the struct and the field that hold it."""
    for name, kind, *_ in args._fields_:
        part = getattr(args, name)
        if isinstance(part, ctypes.Structure):
            yield from _addresses(part)
        elif kind is ctypes.c_void_p and part:
            yield args, name, part
