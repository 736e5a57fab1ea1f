"""Softmax over what every query finds in a forest of key trees, by the compiled kernel (`native/descend.h`)."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from fewkeys.execute.problem import Problem
from fewkeys.native.build import call
from fewkeys.native.tensors import Rows, Told, dense, pointers, struct
from fewkeys.rest.base import NodeStandIns
from fewkeys.tree.descent import CURVE, HIGHEST, Descent, Walk
from fewkeys.tree.forest import Nodes, Table
from fewkeys.tree.leaves import CHUNK
from fewkeys.tree.rule import SINKS

LEAVES = {torch.float32: 0, torch.bfloat16: 1, torch.int8: 2}
"""How the kernel calls the dtypes of leaves."""


def form(problem: Problem) -> str | None:
    """Why there is no kernel for a descent of this form, None where there is."""
    graph, s = problem.graph, problem.stand_ins
    if not isinstance(graph.descent, Descent):
        return f"expected the descent of KeyTree, got {type(graph.descent).__name__}"
    if any(part is not None for part in (graph.band, graph.columns, graph.rows, graph.extra)) or graph.full:
        return "expected keys that each query finds in a tree alone, got others beside them"
    if any(walk.leaves is not None and walk.leaves.form.dtype not in LEAVES for walk in graph.descent.walks):
        return f"expected leaves of {', '.join(map(str, LEAVES))}, got others"
    if s is not None and not isinstance(s, NodeStandIns):
        return f"expected nodes of the tree to stand in, or nothing, got {type(s).__name__}"
    return None


def apart(problem: Problem) -> bool:
    """Whether leaves are held apart from the keys and values: those carry no gradient."""
    return any(walk.leaves is not None for walk in cast("Descent", problem.graph.descent).walks)


def read(problem: Problem) -> list[Tensor]:
    """What the kernel reads that may depend on the inputs."""
    x = problem.inputs
    # Without gradients, nodes are as plain as the keys that they were made of.
    asked = torch.is_grad_enabled() and isinstance(problem.stand_ins, NodeStandIns)
    nodes = [part for walk in _nodes(problem) if asked for table in walk.values() for part in _parts(table)]
    return [x.query, x.key, x.value, *nodes]


def attend(problem: Problem) -> Tensor:
    """The output (B, Hq, Nq, Dv), equal to `reference.attend` up to rounding, and to what nearly equal ranks decide.

    Every query chooses what it opens as it goes: nothing but the output is stored. Cost O(n slots (D + Dv)).
    """
    return attend_each([problem])[0]


def attend_each(problems: Sequence[Problem]) -> list[Tensor]:
    """The outputs of problems of one dtype, by one call of the kernel, whose threads share all sequences and heads."""
    outputs, told, alive = [], [], []
    for problem in problems:
        x = problem.inputs
        outputs.append(x.value.new_empty((*x.query.shape[:3], x.value_dim)))
        for walk, nodes in zip(cast("Descent", problem.graph.descent).walks, _nodes(problem), strict=True):
            own, held = _told(problem, walk, nodes, outputs[-1])
            told.append(own)
            alive.append(held)
    each = (struct("Descend") * len(told))(*told)
    all_ = struct("Descents")(each=ctypes.addressof(each), count=len(told))
    call("fewkeys_descend", all_, problems[0].inputs.query.dtype)
    return outputs


def _nodes(problem: Problem) -> tuple[Nodes, ...]:
    if isinstance(problem.stand_ins, NodeStandIns):
        return problem.stand_ins.nodes
    return tuple(walk.nodes for walk in cast("Descent", problem.graph.descent).walks)


def _leaves(walk: Walk, key: Tensor, value: Tensor) -> dict[str, Any]:
    """Where the keys and values of leaves lie: with all others, or apart."""
    held = walk.leaves
    if held is None:
        rows = [
            Rows(part.data_ptr(), *(stride * part.itemsize for stride in part.stride()[:3])) for part in (key, value)
        ]
        return {"leaf_key": rows[0], "leaf_value": rows[1], "leaf_type": LEAVES[key.dtype], "chunk": 62}
    form, rows_held = held.form, held.held
    chunk, head, row, _ = rows_held.stride()
    rows = [Rows(rows_held.data_ptr() + at, head * key.shape[1], head, row) for at in (form.key_at, form.value_at)]
    return {
        "leaf_key": rows[0],
        "leaf_value": rows[1],
        "leaf_type": LEAVES[form.dtype],
        "leaf_first": SINKS,
        "chunk": CHUNK.bit_length() - 1,
        "chunk_bytes": chunk,
        "skipped": walk.skipped,
    }


def _parts(table: Table) -> tuple[Tensor, Tensor, Tensor]:
    return table.key, table.value, table.variance


def parts(problem: Problem) -> tuple[Tensor, ...]:
    """What carries gradients, beside queries, keys and values: of all nodes."""
    if not isinstance(problem.stand_ins, NodeStandIns):
        return ()
    return tuple(part for nodes in problem.stand_ins.nodes for table in nodes.values() for part in _parts(table))


def of(stand_ins: NodeStandIns, given: Sequence[Tensor]) -> NodeStandIns:
    """The same nodes, of these `parts`."""
    left = iter(given)
    return NodeStandIns(
        tuple({size: Table(next(left), next(left), next(left)) for size in nodes} for nodes in stand_ins.nodes)
    )


def gradients(problem: Problem, gradient: Tensor) -> list[Tensor]:
    """Those of queries, keys, values and `parts`, in float32, given that of the output, in the dtype of the inputs."""
    x, shown = problem.inputs, isinstance(problem.stand_ins, NodeStandIns)
    found = [rows.new_zeros(rows.shape, dtype=torch.float32) for rows in (x.query, x.key, x.value)]
    for walk, nodes in zip(cast("Descent", problem.graph.descent).walks, _nodes(problem), strict=True):
        # Its output is not read: any rows will do.
        told, _alive = _told(problem, walk, nodes, gradient)
        to = [torch.zeros_like(part) for table in nodes.values() if shown for part in _parts(table)]
        numbers = [
            number
            for at, (size, table) in enumerate(nodes.items())
            if shown
            for number in (*(part.data_ptr() for part in to[3 * at : 3 * at + 3]), table.key.shape[1], size)
        ]
        tables = (ctypes.c_int64 * len(numbers))(*numbers)
        held = pointers(dict(zip(("query", "key", "value"), found[:3], strict=True)))
        back = struct("DescendBack")(
            of=told, out=Rows.of(gradient), **held, to=ctypes.addressof(tables), queries=x.queries, keys=x.keys
        )
        call("fewkeys_descend_back", back, x.query.dtype)
        found += to
    return found


def _told(problem: Problem, walk: Walk, nodes: Nodes, output: Tensor) -> tuple[Told, object]:
    """What kernels are told of some sequences, and what must live as long."""
    x, own, forest = problem.inputs, walk.sequences, walk.forest
    query, key, value = (dense(rows) for rows in (x.query, x.key, x.value))
    enough = cast("Descent", problem.graph.descent).enough
    certified = enough is not None and enough.certified
    trees = forest.known.get((id(nodes), certified)) or _trees(walk, nodes, certified)
    forest.known[id(nodes), certified] = trees
    steps = [
        number
        for step, first in zip(own.steps, trees.first, strict=True)
        for number in (step.start, step.stop, step.seen, step.near, first, len(step.levels))
    ]
    seen, order = own.seen.contiguous(), forest.order.contiguous()
    arrays = {"steps": (ctypes.c_int64 * len(steps))(*steps), **trees.arrays}
    told = struct("Descend")(
        **_leaves(walk, key, value),
        **{name: Rows.of(rows) for name, rows in (("query", query), ("key", key), ("value", value), ("out", output))},
        **pointers({"batch": own.batch, "real": own.real, "seen": seen, "order": order}),
        **{name: ctypes.addressof(array) for name, array in arrays.items()},
        count=len(own.steps),
        sequences=x.batch if own.batch is None else own.batch.numel(),
        heads=x.query_heads,
        gqa_ratio=x.gqa_ratio,
        places=forest.order.shape[1],
        dim=x.head_dim,
        value_dim=x.value_dim,
        sinks=SINKS,
        shown=isinstance(problem.stand_ins, NodeStandIns),
        certified=certified,
        spare=-1.0 if enough is None else 1 - enough.mass,
        scale=x.scale,
        curve=CURVE,
        highest=HIGHEST,
    )
    return told, (query, key, value, seen, order, arrays, trees)


@dataclass(frozen=True, eq=False)
class _Trees:
    """What is the same for all queries: `levels`, `runs` and `tables`; where each step's levels begin; what is read."""

    arrays: dict[str, ctypes.Array[ctypes.c_int64]]
    first: list[int]
    alive: object


def _trees(walk: Walk, nodes: Nodes, certified: bool) -> _Trees:
    tables = [tuple(part.contiguous() for part in _parts(table)) for table in nodes.values()]
    radii = [cast(Tensor, walk.nodes[size].radius).contiguous() if certified else None for size in nodes]
    first: list[int] = []
    levels: list[int] = []
    runs: list[int] = []
    place = {size: index for index, size in enumerate(nodes)}
    for step in walk.sequences.steps:
        first.append(len(levels) // 6)
        for level in step.levels:
            levels += (place[level.size], level.size, len(runs) // 2, len(level.trees), level.scored, level.opened)
            for start, size in level.trees:
                runs += (walk.forest.row(start, size, level.size), size // level.size)
    numbers = [
        number
        for one, radius in zip(tables, radii, strict=True)
        for number in (*(part.data_ptr() for part in one), 0 if radius is None else radius.data_ptr(), one[0].shape[1])
    ]
    held = {"levels": levels, "runs": runs, "tables": numbers}
    arrays = {name: (ctypes.c_int64 * len(some))(*some) for name, some in held.items()}
    return _Trees(arrays, first, (nodes, tables, radii))
