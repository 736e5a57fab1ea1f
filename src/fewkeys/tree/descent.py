"""The descent: what every query opens, and what stands in for the rest.

On each level, from coarse to leaf, a query q meets nodes of z keys with mean mu and variances D by

    score = q . mu        spread = sum_i q_i^2 D_i        rank = score + c(z) sqrt(spread)       c(z) = (1 + log2 z) / 2

A mean hides its strongest key: the rank asks how high a key inside may score. For Gaussian scores c(z) = sqrt(2 ln z)
would bound it on average: nearly the same for leaves, and better for text, but a key that is looked up once is an
outlier. The nodes of largest rank are opened, of equal ones those that come first. Every other candidate stands in for
its keys with the mean value and

    logit = score + log z + min(0.3 spread, 3)

where spread / 2 would be right for Gaussian scores, and less measured best. So every sealed key is
either in an opened leaf or inside exactly one stand-in. `fewkeys.tree.enough` says when fewer are opened than could be.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import cast

import torch
from torch import Tensor

from fewkeys.core.derivatives import constants
from fewkeys.core.inputs import Inputs
from fewkeys.tree.enough import Enough, Mass, expected, with_radii
from fewkeys.tree.forest import Forest, Nodes, Table, grow, summarise, take
from fewkeys.tree.leaves import Leaves
from fewkeys.tree.rule import BRANCH, LEAF, SINKS, block_of, scored
from fewkeys.tree.sequences import Sequences, Step, sequences_of

CURVE, HIGHEST = 0.3, 3.0
"""What part of the spread a stand-in's logit gains, and at most how much."""
PIECE = 2**22
"""Numbers of gathered keys held at a time (16 MB in float32)."""


@dataclass(frozen=True, eq=False)
class Unopened:
    """The nodes of `size` keys that stand in: `rows` (H, M, U) of their table, and their logits (H, M, U), -inf where
    one does not. Where `mass` decides, of `scored` (H, M) nodes.
    """

    size: int
    rows: Tensor
    logit: Tensor
    scored: Tensor | None = None


def descend(
    forest: Forest, nodes: Nodes, step: Step, query: Tensor, mass: Mass | None = None
) -> tuple[Tensor, list[Unopened]]:
    """The leaves (H, M, O) that scaled queries (H, M, D) of a step open, and, level by level, what they do not.

    Gradients flow through the logits; what is opened is a choice and carries none. Reads no key, only nodes. Cost
    O(scored D) a query. `mass`: what is known of it before, and is kept up to date; then leaves that are not opened are
    -1.
    """
    square = query.square()
    length = torch.linalg.vector_norm(query.detach(), dim=-1, keepdim=True)
    opened, found = None, []
    for number, level in enumerate(step.levels):
        table = nodes[level.size]
        there = None
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
            if mass is not None:
                there = torch.cat([torch.ones_like(rows, dtype=torch.bool), children >= 0], -1)
                children = children.clamp_min(0)
            rows = torch.cat([rows, children], -1)
            score = torch.cat([score, along(take(table.key, children), query)], -1)
            spread = torch.cat([spread, along(take(table.variance, children), square)], -1)
        logit = score + (math.log(level.size) + (CURVE * spread).clamp_max(HIGHEST))
        with constants():
            rank = score + (1 + math.log2(level.size)) / 2 * spread.sqrt()
            # NaN ranks come last, as in the kernel.
            unranked = rank.isnan() if there is None else rank.isnan() | ~there
            rank = rank.masked_fill(unranked, -torch.inf)
            order = rank.argsort(dim=-1, descending=True, stable=True)
        if mass is None:
            opened, closed = rows.gather(-1, order[..., : level.opened]), order[..., level.opened :]
            found.append(Unopened(level.size, rows.gather(-1, closed), logit.gather(-1, closed)))
            continue
        with constants():
            if mass.enough.certified:
                least = score + math.log(level.size)
                most = least + length * _radii(table, rows)
            else:
                least = most = score + expected(spread, level.size)
            if there is not None:
                least, most = (part.masked_fill(~there, -torch.inf) for part in (least, most))
            count = mass.stop(least, most, order, (number + 1) / len(step.levels), level.opened).unsqueeze(-1)
            opened = rows.gather(-1, order[..., : level.opened])
            opened = opened.masked_fill(torch.arange(opened.shape[-1], device=rows.device) >= count, -1)
            scored_here = rows.shape[-1] if there is None else there.sum(-1)
            hidden = torch.arange(rows.shape[-1], device=rows.device) < count
            if there is not None:
                hidden = hidden | ~there.gather(-1, order)
        logit = logit.gather(-1, order).masked_fill(hidden, -torch.inf)
        found.append(
            Unopened(level.size, rows.gather(-1, order), logit, count.new_zeros(count.shape[:2]) + scored_here)
        )
    if opened is None:
        raise ValueError("step: expected one with levels, got one that keeps every key")
    return opened, found


def _radii(table: Table, rows: Tensor) -> Tensor:
    """(H, M, C) of the nodes at rows (H, M, C)."""
    if table.radius is None:
        raise ValueError("nodes: expected radii for bounds, got none")
    return take(table.radius.unsqueeze(-1), rows).squeeze(-1)


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
        own = {}
        for size, table in nodes.items():
            radius = None if table.radius is None else table.radius[heads]
            own[size] = Table(table.key[heads], table.value[heads], table.variance[heads], radius)
        return replace(self.forest, order=self.forest.order[heads]), own


@dataclass(frozen=True, eq=False)
class Finding:
    """What some queries of a step find: `opened` (H, M, O) leaves, `closed` nodes; `near` (H, M): the logarithm of the
    mass of near keys, and `mass`, where it is asked for.
    """

    step: Step
    heads: slice
    span: slice
    query: Tensor
    forest: Forest
    opened: Tensor
    closed: list[Unopened]
    near: Tensor | None
    mass: Mass | None


def findings(inputs: Inputs, walk: Walk, enough: Enough | None, start: int, stop: int) -> Iterator[Finding]:
    """What the queries start .. stop - 1, and perhaps some beside them, find in a walk; of steps with levels."""
    with constants():
        query = walk.sequences.queries(inputs)
        key = None if enough is None else walk.sequences.rows(inputs.key)
    for step, heads, span in walk.pieces(query.shape[0], query.shape[1], inputs.head_dim + inputs.value_dim):
        if not step.levels or span.stop <= start or span.start >= stop:
            continue
        with constants():  # not around the yield: what others do between two steps is theirs
            forest, nodes = walk.part(walk.nodes, heads)
            asked = query[heads, :, span].flatten(1, 2)
            near = mass = None
            if key is not None and enough is not None:
                near = near_scores(step, key[heads], walk.sequences.seen[span], asked)[0].logsumexp(-1)
                mass = Mass.of(enough, near)
            opened, closed = descend(forest, nodes, step, asked, mass)
        yield Finding(step, heads, span, asked, forest, opened, closed, near, mass)


def near_scores(step: Step, key: Tensor, seen: Tensor, query: Tensor, skipped: int = 0) -> tuple[Tensor, Tensor]:
    """Scores (H, M, C) of near keys, -inf where queries (H, M, D) do not see them, and their rows (C,) among `key`.

    key (H, n - skipped, D), as `Walk` says; seen (M / groups,): how many of all n each query sees.
    """
    place = torch.arange(step.seen, device=query.device)
    place = place[(place < SINKS) | (place >= step.near)]
    hidden = (place >= seen[:, None]).repeat(query.shape[1] // seen.numel(), 1)
    rows = place - skipped * (place >= SINKS)
    return (query @ key[:, rows].mT).masked_fill(hidden, -torch.inf), rows


@dataclass(frozen=True, eq=False)
class Descent:
    """The edges that queries find by descending a forest of their keys: what `Graph` holds of `KeyTree`."""

    inputs: Inputs
    walks: tuple[Walk, ...]
    enough: Enough | None = None

    @staticmethod
    def of(inputs: Inputs, slots: int, enough: Enough | None = None) -> Descent:
        """The forests of a problem whose queries may pay `slots` each, or `enough` of them."""
        walks = []
        for sequences in sequences_of(inputs, slots, block_of(slots)):
            key, value = sequences.rows(inputs.key), sequences.rows(inputs.value)
            forest = grow(sequences, sequences.queries(inputs), key, value, inputs.impl)
            nodes = summarise(forest, key, value, inputs.impl)
            if enough is not None and enough.certified:
                nodes = with_radii(forest, nodes, key)
            walks.append(Walk(sequences, forest, nodes))
        return Descent(inputs, tuple(walks), enough)

    @constants()
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
        x, own = self.inputs, walk.sequences
        count = x.keys if own.real is None else own.real.numel()
        place = torch.arange(count, device=x.key.device)
        seen = own.seen[start:stop, None]
        heads = x.kv_heads * (x.batch if own.batch is None else own.batch.numel())
        found = (place < seen).expand(heads, x.gqa_ratio, -1, -1).clone()
        for part in findings(x, walk, self.enough, start, stop):
            # One place more, for leaves that are not opened.
            keys = take(part.forest.leaves(), part.opened.clamp_min(0))
            keys = keys.masked_fill((part.opened < 0).unsqueeze(-1), count).flatten(2)
            near = (place < SINKS) | (place >= part.step.near)
            kept = torch.cat([near, near.new_zeros(1)]).expand(*keys.shape[:2], -1).scatter(2, keys, True)
            kept = kept[..., :count].unflatten(1, (x.gqa_ratio, -1))
            low, high = max(start, part.span.start), min(stop, part.span.stop)
            own_rows = slice(low - part.span.start, high - part.span.start)
            found[part.heads, :, low - start : high - start] &= kept[:, :, own_rows]
        return found

    def scored(self, start: int, stop: int) -> Tensor:
        """How many nodes each of the queries start .. stop - 1 scores, (B, Hq, stop - start)."""
        x = self.inputs
        found = torch.zeros((x.batch, x.query_heads, x.queries), dtype=torch.int64, device=x.key.device)
        for walk in self.walks:
            counts = [scored(step.levels) for step in walk.sequences.steps for _ in range(step.start, step.stop)]
            own = torch.tensor(counts, device=found.device).expand(x.kv_heads, x.gqa_ratio, -1).clone()
            own = own.repeat(x.batch if walk.sequences.batch is None else walk.sequences.batch.numel(), 1, 1)
            for part in findings(x, walk, self.enough, start, stop) if self.enough is not None else ():
                some = torch.stack([cast(Tensor, level.scored) for level in part.closed]).sum(0)
                own[part.heads, :, part.span] = some.unflatten(1, (x.gqa_ratio, -1))
            self._put(found, walk, own)
        return found[:, :, start:stop]

    @constants()
    def share(self) -> Tensor:
        """The share of each query's softmax mass that is on the keys it keeps, (B, Hq, Nq): at least, where `enough` is
        certified, else by the estimate.
        """
        x, enough = self.inputs, self.enough or Enough(1.0)
        found = torch.ones((x.batch, x.query_heads, x.queries), device=x.key.device)
        for walk in self.walks:
            own = found.new_ones((len(walk.forest.order), x.gqa_ratio, x.queries))
            key = walk.sequences.rows(x.key)
            for part in findings(x, walk, enough, 0, x.queries):
                keys = take(part.forest.leaves(), part.opened.clamp_min(0)).flatten(2)
                score = along(take(key[part.heads], keys), part.query).unflatten(-1, (-1, LEAF))
                score = score.masked_fill((part.opened < 0).unsqueeze(-1), -torch.inf).flatten(2)
                kept = torch.logaddexp(cast(Tensor, part.near), score.logsumexp(-1))
                share = (kept - cast(Mass, part.mass).closed).sigmoid().unflatten(1, (x.gqa_ratio, -1))
                own[part.heads, :, part.span] = share.to(own.dtype)
            self._put(found, walk, own)
        return found

    def _put(self, found: Tensor, walk: Walk, own: Tensor) -> None:
        """Write numbers (H, gqa_ratio, Nq) of a walk where its sequences stand, in (B, Hq, Nq)."""
        rows = own.unflatten(0, (-1, self.inputs.kv_heads)).flatten(1, 2)
        found[slice(None) if walk.sequences.batch is None else walk.sequences.batch] = rows
