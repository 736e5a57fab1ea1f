"""The descent: what every query opens, and what stands in for the rest.

On each level, from coarse to leaf, a query q meets nodes of z keys with mean mu and variances D by

    score = q . mu        spread = sum_i q_i^2 D_i        rank = score + c(z) sqrt(spread)       c(z) = 0.43 log2 z

A mean hides its strongest key: the rank asks how high a key inside may score. The nodes of largest rank are opened,
of equal ones those that come first. Every other candidate stands in for its keys with the mean value and

    logit = score + log z + min(spread / 4, 3)

where spread / 2 would be right for Gaussian scores, and half of it is what measured best. So every sealed key is
either in an opened leaf or inside exactly one stand-in.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fewkeys.core.inputs import Inputs
from fewkeys.tree.forest import Forest, Nodes, grow, summarise, take
from fewkeys.tree.leaves import Leaves
from fewkeys.tree.rule import BRANCH, LEAF, SINKS, block_of, scored
from fewkeys.tree.sequences import Sequences, Step, sequences_of

REACH = 0.43
"""c(z) / log2 z."""
CURVE, HIGHEST = 0.25, 3.0
"""What part of the spread a stand-in's logit gains, and at most how much."""
PIECE = 2**22
"""Numbers of gathered keys held at a time (16 MB in float32)."""


@dataclass(frozen=True, eq=False)
class Unopened:
    """The nodes of `size` keys that stand in: `rows` (H, M, U) of their table, and their logits (H, M, U)."""

    size: int
    rows: Tensor
    logit: Tensor


def descend(forest: Forest, nodes: Nodes, step: Step, query: Tensor) -> tuple[Tensor, list[Unopened]]:
    """The leaves (H, M, O) that scaled queries (H, M, D) of a step open, and, level by level, what they do not.

    Gradients flow through the logits; what is opened is a choice and carries none. Reads no key, only nodes. Cost
    O(scored D) a query.
    """
    square = query.square()
    opened, found = None, []
    for level in step.levels:
        table = nodes[level.size]
        entering = [
            torch.arange(size // level.size, device=query.device) + forest.row(start, size, level.size)
            for start, size in level.trees
        ]
        shared = torch.cat(entering).to(query.device) if entering else query.new_zeros(0, dtype=torch.int64)
        rows = shared.expand(*query.shape[:2], -1)
        score = query @ table.key[:, shared].mT
        spread = square @ table.variance[:, shared].mT
        if opened is not None:
            children = opened.unsqueeze(-1) * BRANCH + torch.arange(BRANCH, device=rows.device)
            children = children.flatten(2)
            rows = torch.cat([rows, children], -1)
            score = torch.cat([score, along(take(table.key, children), query)], -1)
            spread = torch.cat([spread, along(take(table.variance, children), square)], -1)
        with torch.no_grad():
            rank = score + REACH * math.log2(level.size) * spread.sqrt()
            order = rank.argsort(dim=-1, descending=True, stable=True)
        opened, closed = rows.gather(-1, order[..., : level.opened]), order[..., level.opened :]
        logit = score + (math.log(level.size) + (CURVE * spread).clamp_max(HIGHEST))
        found.append(Unopened(level.size, rows.gather(-1, closed), logit.gather(-1, closed)))
    if opened is None:
        raise ValueError("step: expected one with levels, got one that keeps every key")
    return opened, found


def along(rows: Tensor, query: Tensor) -> Tensor:
    """The products (H, M, C) of rows (H, M, C, D) with each one's query (H, M, D)."""
    return (rows @ query.unsqueeze(-1)).squeeze(-1)


@dataclass(frozen=True, eq=False)
class Walk:
    """Some sequences, their forest, and what is known of its nodes, without gradient.

    `leaves`: the keys that are sealed, where they are held apart; None: with all others. Then `skipped` of them, after
    the sinks, are not among the keys of the problem.
    """

    sequences: Sequences
    forest: Forest
    nodes: Nodes
    leaves: Leaves | None = None
    skipped: int = 0

    def pieces(self, heads: int, gqa_ratio: int, width: int) -> Iterator[tuple[Step, slice, slice]]:
        """The steps, each cut into pieces of heads and queries that gather at most `PIECE` numbers at a time.

        `width`: numbers a key. The cut depends on the step alone, not on what comes later.
        """
        for step in self.sequences.steps:
            leaf = step.levels[-1].opened * LEAF if step.levels else 0
            own = max(1, leaf + scored(step.levels)) * width
            count = step.stop - step.start
            some = max(1, PIECE // (own * gqa_ratio * count))
            length = max(1, PIECE // (own * gqa_ratio)) if some == 1 else count
            for head in range(0, heads, some):
                for start in range(step.start, step.stop, length):
                    yield step, slice(head, min(head + some, heads)), slice(start, min(start + length, step.stop))

    def part(self, nodes: Nodes, heads: slice) -> tuple[Forest, Nodes]:
        """The forest and the nodes of some heads."""
        own = {
            size: type(table)(table.key[heads], table.value[heads], table.variance[heads])
            for size, table in nodes.items()
        }
        return replace(self.forest, order=self.forest.order[heads]), own


@dataclass(frozen=True, eq=False)
class Descent:
    """The edges that queries find by descending a forest of their keys: what `Graph` holds of `KeyTree`."""

    inputs: Inputs
    walks: tuple[Walk, ...]

    @staticmethod
    def of(inputs: Inputs, slots: int) -> Descent:
        """The forests of a problem whose queries may pay `slots` each."""
        walks = []
        for sequences in sequences_of(inputs, slots, block_of(slots)):
            key, value = sequences.rows(inputs.key), sequences.rows(inputs.value)
            forest = grow(sequences, sequences.queries(inputs), key, value, inputs.impl)
            walks.append(Walk(sequences, forest, summarise(forest, key, value, inputs.impl)))
        return Descent(inputs, tuple(walks))

    @torch.no_grad()
    def mask(self, start: int, stop: int) -> Tensor:
        """The keys that queries start .. stop - 1 keep, (B, Hq, stop - start, Nk)."""
        x = self.inputs
        found = x.key.new_zeros((x.batch, x.kv_heads, x.gqa_ratio, stop - start, x.keys), dtype=torch.bool)
        for walk in self.walks:
            own = walk.sequences
            kept = self._kept(walk, start, stop).unflatten(0, (-1, x.kv_heads))
            whole = found.new_zeros((*kept.shape[:-1], x.keys))
            whole[..., slice(None) if own.real is None else own.real] = kept
            found[slice(None) if own.batch is None else own.batch] = whole
        return found.flatten(1, 2)

    def _kept(self, walk: Walk, start: int, stop: int) -> Tensor:
        """(H, gqa_ratio, stop - start, n): over the real keys of a walk."""
        own, query = walk.sequences, walk.sequences.queries(self.inputs)
        count = self.inputs.keys if own.real is None else own.real.numel()
        place = torch.arange(count, device=query.device)
        seen = own.seen[start:stop, None]
        found = (place < seen).expand(*query.shape[:2], -1, -1).clone()
        for step, heads, span in walk.pieces(query.shape[0], query.shape[1], sum(_dims(self.inputs))):
            if not step.levels or span.stop <= start or span.start >= stop:
                continue
            forest, nodes = walk.part(walk.nodes, heads)
            opened, _ = descend(forest, nodes, step, query[heads, :, span].flatten(1, 2))
            keys = take(forest.leaves(), opened).flatten(2)
            near = (place < SINKS) | (place >= step.near)
            kept = near.expand(*keys.shape[:2], -1).scatter(2, keys, True)
            kept = kept.unflatten(1, (query.shape[1], -1))
            low, high = max(start, span.start), min(stop, span.stop)
            found[heads, :, low - start : high - start] &= kept[:, :, low - span.start : high - span.start]
        return found

    def scored(self, start: int, stop: int) -> Tensor:
        """How many nodes each of the queries start .. stop - 1 scores, (B, Hq, stop - start)."""
        x = self.inputs
        found = torch.zeros((x.batch, x.queries), dtype=torch.int64, device=x.key.device)
        for walk in self.walks:
            counts = [scored(step.levels) for step in walk.sequences.steps for _ in range(step.start, step.stop)]
            own = walk.sequences.batch
            found[slice(None) if own is None else own] = torch.tensor(counts, device=found.device)
        return found[:, None, start:stop].expand(-1, x.query_heads, -1)


def _dims(inputs: Inputs) -> tuple[int, int]:
    return inputs.head_dim, inputs.value_dim
