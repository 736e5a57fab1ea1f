"""Sequences that come piece by piece, and the trees over all that came: what a query asks of the past, at hand.

    tokens -> keys, values, newest queries -> (every `block` tokens) one tree is built, smaller ones give way -> walks

Of the trees that were ever built only those that cover the sealed keys are needed. They stand in `order` where their
keys stand, so that the nodes of s keys of a tree from sealed key `start` on are rows start / s, ... of their table.
Trees that gave way during the last `UNDO` blocks are remembered, so that tokens can be taken back.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, replace

import torch
from torch import Tensor

from fewkeys.core.buffer import Buffer, room_for, widened
from fewkeys.core.precision import working
from fewkeys.past.running import RunningQueries
from fewkeys.tree.descent import Walk
from fewkeys.tree.forest import Forest, Stand, Table, by_kernels, needed, order_of, summarise
from fewkeys.tree.leaves import Form, Held, Leaves
from fewkeys.tree.metric import roots_after, turn_of
from fewkeys.tree.rule import BRANCH, LEAF, SINKS, block_of, cover, exact_keys, levels_of
from fewkeys.tree.sequences import Sequences, steps_after

UNDO = 8
"""Sealed blocks that can be taken back."""
FEW = 2
"""Steps that are taken one after the other; more are taken at once."""

Place = tuple[int, int]
"""A tree: its first sealed key, and its size."""


def skipped_of(slots: int, folded: int) -> int:
    """How many sealed keys no query sees beside its leaves any more, where so many tokens cannot be taken back."""
    block, sealed = block_of(slots), folded - SINKS
    return sealed if sealed > 0 and levels_of(slots, sealed, exact_keys(block), block) else 0


class Cover(Forest):
    """Trees that stand in the order where their keys stand among the sealed ones."""

    def row(self, start: int, tree: int, size: int) -> int:
        return start // size


@dataclass(eq=False)
class Growing:
    """Sequences of a batch whose real tokens come together: B of them, with H = B Hkv heads; padding never enters.

    leaves: keys and values of the first `sealed` tokens after the sinks. key (B, Hkv, count - skipped, D) and value, as
    they came: of the sinks, and of those that are not sealed, or may be taken back. query (B, Hkv, groups,
    count - folded, D): the newest scaled queries, in working precision, zero where none came; `asked` (count - folded,)
    says where one did. past: float64 sums over the queries of the first `folded` tokens. order (H, room): the trees of
    the first `sealed` keys after the sinks, and `nodes`, their tables. spare: orders (H, size) of trees that gave way.
    """

    slots: int
    leaves: Leaves
    key: Buffer
    value: Buffer
    query: Buffer
    asked: Tensor
    past: RunningQueries
    order: Tensor
    nodes: dict[int, Table] = field(default_factory=dict)
    spare: dict[Place, Tensor] = field(default_factory=dict)
    sealed: int = 0
    folded: int = 0
    _standing: tuple[int, Cover] | None = None

    @staticmethod
    def empty(slots: int, held: Held, key: Tensor, value: Tensor) -> Growing:
        """Before the first token, in the shape of keys (B, Hkv, N, D) and values."""
        batch, heads, _, dim = key.shape
        none, count = working(key[:, :, :0]), batch * heads
        past = RunningQueries(
            none.new_zeros((1, 1), dtype=torch.float64),
            none.new_zeros((count, 1, dim), dtype=torch.float64),
            none.new_zeros((count, dim, dim), dtype=torch.float64),
        )
        nothing = torch.zeros(0, dtype=torch.int64, device=key.device)
        leaves = Leaves(held, Form.of(held.dtype, key, value), count, key.device)
        near = (Buffer(key[:, :, :0]), Buffer(value[:, :, :0]), Buffer(none.unsqueeze(2)))
        return Growing(slots, leaves, *near, nothing.bool(), past, nothing.expand(count, -1))

    @property
    def batch(self) -> int:
        return self.key.held.shape[0]

    @property
    def count(self) -> int:
        """Tokens so far."""
        return self.key.count + self.skipped

    @property
    def skipped(self) -> int:
        """Tokens after the sinks that are held in leaves alone."""
        return skipped_of(self.slots, self.folded)

    @property
    def block(self) -> int:
        return block_of(self.slots)

    def make_room(self, count: int) -> None:
        """Make room for so many more tokens in a file of leaves; `OSError` where there is none."""
        self.leaves.make_room(max(0, self.count + count - 1 - SINKS) // self.block * self.block)

    def append(self, key: Tensor, value: Tensor, query: Tensor | None = None) -> None:
        """Add tokens: keys (B, Hkv, N, D), values, and scaled queries (B, Hkv, groups, N, D) if any."""
        self.key.append(key)
        self.value.append(value)
        came = query is not None
        if query is None:
            query = self.query.held.new_zeros((*self.query.held.shape[:3], key.shape[2], key.shape[3]))
        elif self.query.held.shape[2] != query.shape[2]:  # until now nobody has asked
            self.query = Buffer.of(self.query.rows[:, :, :1].expand(-1, -1, query.shape[2], -1, -1))
        self.query.append(query)
        self.asked = torch.cat([self.asked, self.asked.new_full((key.shape[2],), came)])

    def walks(self, fresh: int) -> Iterator[tuple[slice, Walk]]:
        """Which of the `fresh` newest queries see what: to be attended from before the next is asked for.

        Builds what is to be built. A few steps are taken one by one, in place; more at once, in a forest of their own.
        """
        device, first = self.asked.device, self.count - fresh + 1
        steps = steps_after(self.count - fresh, fresh, self.slots, self.block)
        self._seal(steps[-1].sealed)
        if len(steps) <= FEW:
            for step in steps:
                self._reach(step.sealed)
                span, length = slice(step.start, step.stop), step.stop - step.start
                seen = torch.arange(first + step.start, first + step.stop, device=device)
                asking = torch.arange(length, device=device)
                own = (replace(step, start=0, stop=length),)
                sequences = Sequences(None, None, seen, asking, True, self.block, own)
                yield span, Walk(sequences, self._cover(), self.nodes, self.leaves, self.skipped)
        else:
            seen = torch.arange(first, self.count + 1, device=device)
            sequences = Sequences(None, None, seen, seen - seen[0], True, self.block, steps)
            forest = self._forest(sequences)
            rows = self.leaves.rows(0, steps[-1].sealed)
            nodes = summarise(replace(forest, order=forest.order - SINKS), *rows)
            yield slice(0, fresh), Walk(sequences, forest, nodes, self.leaves, self.skipped)
            trees = forest.trees()
            orders = forest.order.split([size for _, size in trees], 1)
            self._reach(steps[-1].sealed, dict(zip(trees, orders, strict=True)))
        self._fold()

    def select(self, index: Tensor) -> Growing:
        """The sequences `index` (M,) of these."""

        def pick(rows: Tensor) -> Tensor:
            found: Tensor = rows.unflatten(0, (self.batch, -1))[index].flatten(0, 1)
            return found

        return replace(
            self,
            leaves=self.leaves.select(pick(torch.arange(len(self.order), device=index.device))),
            key=self.key.select(index),
            value=self.value.select(index),
            query=self.query.select(index),
            past=RunningQueries(self.past.count.clone(), pick(self.past.total), pick(self.past.square)),
            order=pick(self.order),
            nodes={
                size: Table(pick(table.key), pick(table.value), pick(table.variance))
                for size, table in self.nodes.items()
            },
            spare={tree: pick(order) for tree, order in self.spare.items()},
            _standing=None,
        )

    def crop(self, count: int) -> None:
        """Forget what came after the first `count` tokens; `can_crop` says whether that can be undone."""
        left = count - self.folded
        self.asked = self.asked[:left]
        self.key.count = self.value.count = count - self.skipped
        self.query.count = left
        sealed = min(self.sealed, max(0, (count - 1 - SINKS) // self.block * self.block, self.folded - SINKS))
        self.leaves.count = sealed
        if sealed < self.sealed:
            standing = set(cover(self.sealed, self.block))
            self.sealed, self.spare = sealed, {tree: own for tree, own in self.spare.items() if sum(tree) <= sealed}
            for tree in cover(sealed, self.block):
                if tree not in standing:
                    self._write(tree, self.spare.pop(tree))

    def can_crop(self, count: int) -> bool:
        """Whether everything after the first `count` tokens can be undone."""
        return count >= self.folded

    def bytes(self) -> int:
        """Memory held."""
        parts = [self.key.held, self.value.held, self.query.held, self.asked, self.order, *self.spare.values()]
        parts += [getattr(self.past, one.name) for one in fields(self.past)]
        parts += [part for table in self.nodes.values() for part in (table.key, table.value, table.variance)]
        return self.leaves.bytes() + sum(part.numel() * part.element_size() for part in parts)

    def tensors(self) -> dict[str, Tensor]:
        """What is not made of the rest, by name; `of` goes on from it."""
        found = {"key": self.key.rows, "value": self.value.rows, "query": self.query.rows}
        found["leaves"] = self.leaves.written()
        found |= {"asked": self.asked, "order": self.order[:, : self.sealed]}
        found |= {f"past.{one.name}": getattr(self.past, one.name) for one in fields(self.past)}
        return found | {f"spare.{start}.{size}": order for (start, size), order in self.spare.items()}

    @staticmethod
    def of(slots: int, held: Held, sealed: int, folded: int, tensors: Mapping[str, Tensor]) -> Growing:
        """The sequences of `tensors`; `KeyError` where one is missing."""
        found = Growing.empty(slots, held, tensors["key"], tensors["value"])
        found.leaves = Leaves.of(held, found.leaves.form, tensors["leaves"])
        found.key, found.value, found.query = (Buffer.of(tensors[name]) for name in ("key", "value", "query"))
        found.asked, found.folded = tensors["asked"], folded
        found.past = RunningQueries(**{one.name: tensors[f"past.{one.name}"] for one in fields(RunningQueries)})
        orders = {name: part for name, part in tensors.items() if name.startswith("spare.")}
        found.spare = {(int(name.split(".")[1]), int(name.split(".")[2])): part for name, part in orders.items()}
        for start, size in cover(sealed, found.block):
            found._write((start, size), tensors["order"][:, start : start + size])
        found.sealed = sealed
        return found

    def _seal(self, sealed: int) -> None:
        """Write the leaves of so many keys."""
        new = slice(SINKS + self.leaves.count - self.skipped, SINKS + sealed - self.skipped)
        if new.start < new.stop:
            self.leaves.append(self.key.rows[:, :, new], self.value.rows[:, :, new])

    def _reach(self, sealed: int, found: Mapping[Place, Tensor] | None = None) -> None:
        """Bring the trees to so many sealed keys; `found`: orders of some that are built already."""
        if sealed <= self.sealed:
            return
        before, after = cover(self.sealed, self.block), cover(sealed, self.block)
        held = dict(self.spare) | {
            (start, size): self.order[:, start : start + size].clone()
            for start, size in before
            if (start, size) not in after
        }
        held |= found or {}
        least = max(0, sealed - UNDO * self.block, self.folded - SINKS)
        undone = {tree for last in range(least, sealed, self.block) for tree in cover(last, self.block)}
        wanted = sorted((undone | set(after)) - set(held) - set(before), key=lambda tree: tree[1])
        if wanted:
            held |= self._build(wanted)
        for tree in after:
            if tree not in before:
                self._write(tree, held[tree])
        # Copies: what is built at once is a part of something larger.
        self.spare = {tree: held[tree].clone() for tree in undone.difference(after)}
        self.sealed = sealed

    def _build(self, trees: list[Place]) -> dict[Place, Tensor]:
        """The orders (H, size) of trees, those of equal size side by side."""
        first = min(start for start, _ in trees)
        last = max(start + size for start, size in trees)
        ends = torch.tensor([sum(tree) for tree in trees], device=self.asked.device) // self.block
        blocks, kind = ends.unique(return_inverse=True)
        turn = turn_of(torch.arange(self.folded, self.count, device=self.asked.device) + 1, self.block)
        query = self.query.rows.flatten(0, 1)
        if not bool(self.asked.all()):
            query, turn = query[:, :, self.asked], turn[self.asked]
        metric = roots_after(query, turn, blocks, self.past, by_kernels("auto", query))
        key, value = self.leaves.rows(first, last)
        before = first + SINKS  # what is written has no sinks
        order = order_of([(start - before, size) for start, size in trees], metric, kind, key, value)
        orders = (order + before).split([size for _, size in trees], 1)
        return dict(zip(trees, orders, strict=True))

    def _cover(self) -> Cover:
        """The trees that stand; what is remembered of them is true until another comes, or all find more room."""
        if self._standing is None or self._standing[0] != self.sealed or self._standing[1].order is not self.order:
            self._standing = self.sealed, Cover(self.order, {})
        return self._standing[1]

    def _write(self, tree: Place, order: Tensor) -> None:
        """Let a tree stand where its keys stand, and know its nodes."""
        start, size = tree
        self._widen(start + size)
        self.order[:, start : start + size] = order
        key, value = self.leaves.rows(start, start + size)
        alone = Forest(order - start - SINKS, {size: Stand(size, 0, 1, 0)})
        for inside, table in summarise(alone, key, value).items():
            rows = slice(start // inside, (start + size) // inside)
            held = self.nodes[inside]
            held.key[:, rows], held.value[:, rows], held.variance[:, rows] = table.key, table.value, table.variance

    def _widen(self, sealed: int) -> None:
        """Room for so many sealed keys."""
        heads, held = self.order.shape
        if (room := room_for(sealed, held)) == held:
            return
        self.order = widened(self.order.unsqueeze(-1), room).squeeze(-1)
        dims = (self.key.held.shape[3], self.value.held.shape[3], self.key.held.shape[3])
        size = LEAF
        while size <= room:
            none = [self.query.held.new_zeros((heads, 0, dim)) for dim in dims]
            own = self.nodes.get(size)
            parts = none if own is None else (own.key, own.value, own.variance)
            self.nodes[size] = Table(*(widened(part, room // size) for part in parts))
            size *= BRANCH

    def _forest(self, sequences: Sequences) -> Forest:
        """The forest of many steps: trees that stand already, and new ones."""
        stands = needed(sequences)
        found = Forest(self.order.new_zeros((self.order.shape[0], 0)), stands)
        if not stands:
            return found
        trees = found.trees()
        new = [tree for tree in trees if sum(tree) > self.sealed]
        built = self._build(new) if new else {}
        orders = [built[tree] if tree in built else self.order[:, tree[0] : sum(tree)] for tree in trees]
        return replace(found, order=torch.cat(orders, 1))

    def _fold(self) -> None:
        """Let sums stand for the queries of blocks that will not be taken back."""
        first = SINKS + self.sealed - UNDO * self.block
        some = first - self.folded
        if first <= 0 or some <= 0:
            return
        rows = self.query.rows[:, :, :, :some][:, :, :, self.asked[:some]].flatten(0, 1).flatten(1, 2).double()
        self.past = self.past + RunningQueries(
            torch.full_like(self.past.count, rows.shape[1]), rows.sum(1, keepdim=True), rows.mT @ rows
        )
        skipped, self.asked, self.folded = self.skipped, self.asked[some:], first
        self.query.drop(some)
        self.key.drop(self.skipped - skipped, after=SINKS)
        self.value.drop(self.skipped - skipped, after=SINKS)
