"""Plans whose queries descend a tree: keys and stand-ins of each query, gathered for a piece of queries at a time.

Memory O(n (D + Dv)) beside the forest: what is gathered has a fixed size, but where gradients are wanted.
"""

from __future__ import annotations

from dataclasses import replace
from typing import cast

import torch
from torch import Tensor

from fewkeys.core.weights import Weights, positive
from fewkeys.execute.problem import Problem
from fewkeys.rest.base import NodeStandIns
from fewkeys.tree.descent import Descent, Walk, along, descend, near_scores
from fewkeys.tree.enough import Enough, Mass
from fewkeys.tree.forest import Nodes, take
from fewkeys.tree.rule import LEAF, SINKS
from fewkeys.tree.sequences import Step


def knows(problem: Problem) -> bool:
    """Whether the graph is a descent and nothing else."""
    graph = problem.graph
    others = (graph.band, graph.columns, graph.rows, graph.extra)
    return isinstance(graph.descent, Descent) and not graph.full and all(other is None for other in others)


def attend(problem: Problem) -> Tensor:
    """The output (B, Hq, Nq, Dv), equal to `reference.attend` up to rounding. Cost O(n slots (D + Dv))."""
    x, descent, stand_ins = problem.inputs, cast("Descent", problem.graph.descent), problem.stand_ins
    parts, places = [], []
    for index, walk in enumerate(descent.walks):
        nodes = stand_ins.nodes[index] if isinstance(stand_ins, NodeStandIns) else None
        output: Tensor = _walk(problem, walk, nodes).to(x.query.dtype).unflatten(0, (-1, x.kv_heads)).flatten(1, 2)
        if walk.sequences.batch is None:
            return output
        parts.append(output)
        places.append(walk.sequences.batch)
    return torch.cat(parts)[torch.cat(places).argsort()]


def _walk(problem: Problem, walk: Walk, stand_ins: Nodes | None) -> Tensor:
    """The output (H, gqa_ratio, Nq, Dv) of some sequences."""
    x, own = problem.inputs, walk.sequences
    query, key, value = own.queries(x), own.rows(x.key), own.rows(x.value)
    enough = cast("Descent", problem.graph.descent).enough
    rows: dict[tuple[int, int], list[Tensor]] = {}
    for step, heads, span in walk.pieces(query.shape[0], query.shape[1], x.head_dim + x.value_dim):
        asked = query[heads, :, span]
        piece = _Piece(walk, step, heads, own.seen[span], key, value, enough)
        found = piece.attend(asked.flatten(1, 2), stand_ins, problem.weights).unflatten(1, asked.shape[1:3])
        rows.setdefault((span.start, span.stop), []).append(found)
    return torch.cat([torch.cat(found) for found in rows.values()], 2)


class _Piece:
    """Some queries of a step, and what they attend to."""

    def __init__(
        self, walk: Walk, step: Step, heads: slice, seen: Tensor, key: Tensor, value: Tensor, enough: Enough | None
    ) -> None:
        self.walk, self.step, self.heads, self.seen, self.enough = walk, step, heads, seen, enough
        self.key, self.value = key[heads], value[heads]

    def attend(self, query: Tensor, stand_ins: Nodes | None, weights: Weights) -> Tensor:
        """The output (H, M, Dv) of queries (H, M, D); zero where there is no key to see."""
        if not self.step.seen:
            return query.new_zeros((*query.shape[:2], self.value.shape[2]))
        near, rows = near_scores(self.step, self.key, self.seen, query, self.walk.skipped)
        near_value, scores = self.value[:, rows], [near]
        values: list[Tensor] = []
        if self.step.levels:
            self._far(query, stand_ins, scores, values)
        (found,) = weights.kernel([torch.cat(scores, -1)])
        first, *others = found.split([part.shape[-1] for part in scores], -1)
        mixed = first @ near_value
        for part, rows in zip(others, values, strict=True):
            mixed = mixed + (part.unsqueeze(-2) @ rows).squeeze(-2)
        output: Tensor = mixed / positive(found.sum(-1, keepdim=True))
        return output

    def _far(self, query: Tensor, stand_ins: Nodes | None, scores: list[Tensor], values: list[Tensor]) -> None:
        """Add the scores and values of the keys of opened leaves, and of what stands in."""
        known = self.walk.nodes if stand_ins is None else stand_ins
        if self.enough is not None and self.enough.certified and stand_ins is not None:
            known = {size: replace(table, radius=self.walk.nodes[size].radius) for size, table in stand_ins.items()}
        forest, nodes = self.walk.part(known, self.heads)
        mass = None if self.enough is None else Mass.of(self.enough, scores[0].detach().logsumexp(-1))
        opened, closed = descend(forest, nodes, self.step, query, mass)
        keys, leaves = take(forest.leaves(), opened.clamp_min(0)).flatten(2), self.walk.leaves
        if leaves is None:
            found = take(self.key, keys), take(self.value, keys)
        else:
            found = leaves.take(self.heads, keys - SINKS)
        hidden = (opened < 0).repeat_interleave(LEAF, -1)
        scores.append(along(found[0], query).masked_fill(hidden, -torch.inf))
        values.append(found[1])
        if stand_ins is None:
            return
        scores.append(torch.cat([own.logit for own in closed], -1))
        values.append(torch.cat([take(nodes[own.size].value, own.rows) for own in closed], 2))
