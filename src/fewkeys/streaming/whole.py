"""Memory of every token, in trees that each query descends: much is held, little is read.

Sequences of the batch that are padded alike grow together (`fewkeys.tree.growing`); padding is not held at all.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fewkeys.core.graph import Graph
from fewkeys.core.inputs import Inputs
from fewkeys.core.precision import working
from fewkeys.execute import dispatch
from fewkeys.execute.problem import Problem
from fewkeys.plan import Plan
from fewkeys.select import KeyTree
from fewkeys.streaming.restored import check_whole
from fewkeys.tree.descent import Descent, Walk
from fewkeys.tree.growing import UNDO, Growing
from fewkeys.tree.rule import block_of


@dataclass(frozen=True, eq=False)
class Group:
    """Sequences `rows` (M,) of the batch, and what they hold."""

    rows: Tensor
    growing: Growing

    def by_padding(self, real: Tensor) -> list[Group]:
        """Parts that are padded alike in `real` (B, N)."""
        kinds, kind = real[self.rows].unique(dim=0, return_inverse=True)
        if len(kinds) == 1:
            return [self]
        some = [(kind == number).nonzero().squeeze(-1) for number in range(len(kinds))]
        return [Group(self.rows[which], self.growing.select(which)) for which in some]


class Whole:
    """What a stream holds under `KeyTree` (`fewkeys.streaming.stream.Memory`)."""

    def __init__(self, plan: Plan) -> None:
        held = [part.remembered for part in plan.parts]
        if len(held) != 1 or held[0] is None or not held[0].tree:
            raise ValueError(f"plan: a stream keeps KeyTree alone, without rules beside it, got {plan.keep}")
        self.plan, self.slots = plan, held[0].tree
        self.enough = next((part.enough for part in plan.parts if isinstance(part, KeyTree)), None)
        if self.enough is not None and self.enough.certified:
            raise ValueError("plan: a stream holds no radii of nodes, which certified=True needs; give mass alone")
        self._length = 0
        self._groups: list[Group] = []

    @staticmethod
    def suits(plan: object) -> bool:
        """Whether some part of a plan asks for a tree over all keys."""
        parts = plan.parts if isinstance(plan, Plan) and plan.keep is not None else ()
        return any(part.remembered is not None and part.remembered.tree for part in parts)

    def take(self, query: Tensor | None, key: Tensor, value: Tensor, real: Tensor, scale: float) -> Tensor:
        """Padding is asked nothing: its outputs are zero."""
        if not self._groups:
            every = torch.arange(key.shape[0], device=key.device)
            self._groups = [Group(every, Growing.empty(self.slots, key, value))]
        first, self._length = self._length, self._length + key.shape[2]
        if len(self._groups) == 1 and bool(real.all()):
            place = torch.arange(first, self._length, device=key.device)
            return self._take(self._groups[0].growing, query, key, value, place, scale)
        self._groups = [part for group in self._groups for part in group.by_padding(real)]
        heads, tokens = (key.shape[1], 0) if query is None else query.shape[1:3]
        output = value.new_zeros((key.shape[0], heads, tokens, value.shape[3]))
        for group in self._groups:
            inside = real[group.rows[0]].nonzero().squeeze(-1)
            if not len(inside):
                continue
            asked = None if query is None else query[group.rows][:, :, inside]
            rows = [part[group.rows][:, :, inside] for part in (key, value)]
            found = self._take(group.growing, asked, rows[0], rows[1], inside + first, scale)
            if query is not None:
                output[group.rows[:, None], :, inside] = found.transpose(1, 2)
        return output

    def select(self, index: Tensor) -> None:
        found = [(group, (index[:, None] == group.rows).nonzero()) for group in self._groups]
        self._groups = [Group(at[:, 0], group.growing.select(at[:, 1])) for group, at in found if len(at)]

    def crop(self, length: int) -> None:
        if not all(group.growing.can_crop(length) for group in self._groups):
            raise ValueError(
                f"length: expected at most {UNDO} sealed blocks of {block_of(self.slots)} tokens to be taken back, got "
                f"{length} after {self._length}. Save the stream before tokens that may be taken back"
            )
        for group in self._groups:
            group.growing.crop(length)
        self._length = length

    def merge(self, other: Whole) -> None:
        if not self._groups:
            self._length = other._length
            self._groups = [Group(own.rows, own.growing.copy()) for own in other._groups]
        elif other._groups:
            raise ValueError(
                "other: expected a stream whose memory has a fixed size, got one of KeyTree, whose trees depend on all "
                "queries before them; append its tokens instead"
            )

    def like(self) -> tuple[Tensor, ...]:
        if not self._groups:
            return ()
        batch, growing = sum(len(group.rows) for group in self._groups), self._groups[0].growing
        return tuple(rows.held[:1, :, :0].expand(batch, -1, -1, -1) for rows in (growing.key, growing.value))

    def bytes(self) -> int:
        return sum(group.growing.bytes() for group in self._groups)

    def tensors(self) -> dict[str, Tensor]:
        return {
            f"{number}.{name}": tensor
            for number, group in enumerate(self._groups)
            for name, tensor in ({"rows": group.rows} | group.growing.tensors()).items()
        }

    def facts(self) -> dict[str, Any]:
        return {"groups": [{"sealed": own.growing.sealed, "folded": own.growing.folded} for own in self._groups]}

    def restore(self, facts: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        length, held = facts["length"], {name: fact for name, fact in facts.items() if name != "length"}
        self._length, self._groups = length, []
        for number, counts in enumerate(check_whole(tensors, length, held, self.slots)):
            own = {name.partition(".")[2]: part for name, part in tensors.items() if name.startswith(f"{number}.")}
            growing = Growing.of(self.slots, counts.sealed, counts.folded, own)
            self._groups.append(Group(own["rows"], growing))

    def _take(
        self, growing: Growing, query: Tensor | None, key: Tensor, value: Tensor, place: Tensor, scale: float
    ) -> Tensor:
        """The outputs of real tokens."""
        rows = None if query is None else working(query).unflatten(1, (key.shape[1], -1)) * scale
        growing.append(key, value, place, rows)
        outputs, before = [value[:, :, :0]], growing.count - key.shape[2]
        for span, walk in growing.walks(key.shape[2]):
            if query is not None:
                seen = slice(0, before + span.stop)
                held_key, held_value = growing.key.rows[:, :, seen], growing.value.rows[:, :, seen]
                outputs.append(self._attend(query[:, :, span], held_key, held_value, walk, scale))
        return torch.cat(outputs[1:], 2) if len(outputs) > 2 else outputs[-1]

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, walk: Walk, scale: float) -> Tensor:
        inputs = Inputs(query, key, value, scale, is_causal=True, offset=key.shape[2] - query.shape[2])
        graph = Graph(inputs, descent=Descent(inputs, (walk,), self.enough))
        weights = self.plan.weights
        return dispatch.attend(Problem(inputs, graph, self.plan.rest.prepare(inputs, graph, weights), weights))
