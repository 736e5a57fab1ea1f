"""Memory of every token, in trees that each query descends: much is held, little is read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor

from fewkeys.core.graph import Graph
from fewkeys.core.inputs import Inputs
from fewkeys.core.precision import working
from fewkeys.execute.problem import Problem
from fewkeys.plan import Plan
from fewkeys.streaming.restored import check_whole
from fewkeys.tree.descent import Descent, Walk
from fewkeys.tree.growing import UNDO, Growing
from fewkeys.tree.leaves import Held
from fewkeys.tree.rule import block_of


class Whole:
    """What sequences leave under `KeyTree` (`fewkeys.streaming.padded.Memory`)."""

    _growing: Growing

    def __init__(self, plan: Plan, how: Held) -> None:
        held = [part.remembered for part in plan.parts]
        if len(held) != 1 or held[0] is None or not held[0].tree:
            raise ValueError(f"plan: a stream keeps KeyTree alone, without rules beside it, got {plan.keep}")
        self.plan, self.how, self.slots, self.enough = plan, how, held[0].tree, held[0].enough
        if self.enough is not None and self.enough.certified:
            raise ValueError("plan: a stream holds no radii of nodes, which certified=True needs; give mass alone")

    @staticmethod
    def suits(plan: object) -> bool:
        """Whether some part of a plan asks for a tree over all keys."""
        parts = plan.parts if isinstance(plan, Plan) and plan.keep is not None else ()
        return any(part.remembered is not None and part.remembered.tree for part in parts)

    def begin(self, key: Tensor, value: Tensor) -> Whole:
        return self._of(Growing.empty(self.slots, self.how, key, value))

    def make_room(self, count: int) -> None:
        self._growing.make_room(count)

    def take(self, query: Tensor | None, key: Tensor, value: Tensor, scale: float) -> Iterator[Problem]:
        growing = self._growing
        rows = None if query is None else working(query).unflatten(1, (key.shape[1], -1)) * scale
        growing.append(key, value, rows)
        before = growing.count - key.shape[2]
        for span, walk in growing.walks(key.shape[2]):
            if query is not None:
                seen = slice(0, before + span.stop - walk.skipped)
                near = growing.key.rows[:, :, seen], growing.value.rows[:, :, seen]
                yield self._problem(query[:, :, span], *near, walk, scale)

    def select(self, index: Tensor) -> Whole:
        return self._of(self._growing.select(index))

    def refusal(self, count: int) -> str | None:
        if self._growing.can_crop(count):
            return None
        return f"expected at most {UNDO} sealed blocks of {block_of(self.slots)} tokens to be taken back"

    def crop(self, count: int) -> None:
        self._growing.crop(count)

    def merge(self, other: Whole) -> None:
        raise ValueError(
            "other: expected a stream whose memory has a fixed size, got one of KeyTree, whose trees depend on all "
            "queries before them; append its tokens instead"
        )

    def like(self) -> tuple[Tensor, Tensor]:
        return self._growing.key.held, self._growing.value.held

    def bytes(self) -> int:
        return self._growing.bytes()

    def tensors(self) -> dict[str, Tensor]:
        return self._growing.tensors()

    def facts(self) -> dict[str, Any]:
        return {"sealed": self._growing.sealed, "folded": self._growing.folded}

    def restored(self, count: int, facts: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Whole:
        counts = check_whole(tensors, count, facts, self.slots, self.how)
        return self._of(Growing.of(self.slots, self.how, counts.sealed, counts.folded, tensors))

    def _of(self, growing: Growing) -> Whole:
        found = Whole(self.plan, self.how)
        found._growing = growing
        return found

    def _problem(self, query: Tensor, key: Tensor, value: Tensor, walk: Walk, scale: float) -> Problem:
        inputs = Inputs(query, key, value, scale, is_causal=True, offset=key.shape[2] - query.shape[2])
        graph = Graph(inputs, descent=Descent(inputs, (walk,), self.enough))
        weights = self.plan.weights
        return Problem(inputs, graph, self.plan.rest.prepare(inputs, graph, weights), weights)
