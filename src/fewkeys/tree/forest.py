"""All trees that some sequences need, and what is known of their nodes.

The trees of z keys stand side by side in one permutation of key positions, `order`, the largest first: then node i of s
keys is `order[s i : s (i + 1)]` whatever its tree, its children are 4 i .. 4 i + 3, and a table of nodes of s keys has
as many rows as there are keys in trees of at least s. A tree is built once, from the keys, values and queries up to
its own end; nothing that comes later changes it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, groupby
from typing import Any

import torch
from torch import Tensor

from fewkeys.core.impl import COMPILED, Impl
from fewkeys.native.tensors import readable, suits
from fewkeys.tree import native
from fewkeys.tree.metric import VALUES, features, roots
from fewkeys.tree.rule import BRANCH, LEAF, SINKS, cover, together
from fewkeys.tree.sequences import Sequences
from fewkeys.tree.split import split


@dataclass(frozen=True)
class Stand:
    """`count` trees of `size` keys. Not every place has one: where the last of `together` would be, a larger one is.

    `first`: how many of this size were built before the first of them. `base`: its place in the order.
    """

    size: int
    first: int
    count: int
    base: int

    def trees(self) -> list[tuple[int, int]]:
        """The first sealed key of each tree, and its size."""
        built = range(self.first, self.first + self.count)
        return [((number + number // (together(self.size) - 1)) * self.size, self.size) for number in built]


@dataclass(frozen=True, eq=False)
class Forest:
    """`order` (H, R), int64: positions of keys (sinks counted), tree after tree; `stands`: by size, largest first."""

    order: Tensor
    stands: Mapping[int, Stand]
    known: dict[Any, Any] = field(init=False, default_factory=dict, repr=False)
    """What kernels were told of it."""

    def row(self, start: int, tree: int, size: int) -> int:
        """The first of the nodes of `size` keys of the tree of `tree` keys that begins at sealed key `start`."""
        return self.place[start, tree] // size

    @cached_property
    def place(self) -> dict[tuple[int, int], int]:
        """Where each tree, its first sealed key and its size, begins in the order."""
        trees = self.trees()
        return dict(zip(trees, accumulate((size for _, size in trees), initial=0), strict=False))

    def trees(self) -> list[tuple[int, int]]:
        """The first sealed key and the size of every tree, in their order."""
        return [tree for stand in self.stands.values() for tree in stand.trees()]

    def leaves(self) -> Tensor:
        """(H, R / 8, 8): the keys of every leaf."""
        leaves: Tensor = self.order.unflatten(1, (-1, LEAF))
        return leaves


def _number(start: int, size: int) -> int:
    """How many trees of the size were built before the one that begins at a sealed key."""
    place = start // size
    return place - place // together(size)


@dataclass(frozen=True, eq=False)
class Table:
    """Nodes of one size: mean key (H, R_s, D), mean value (H, R_s, Dv), variance of each coordinate (H, R_s, D), and,
    where bounds are asked for, `radius` (H, R_s): no key is farther from the mean.
    """

    key: Tensor
    value: Tensor
    variance: Tensor
    radius: Tensor | None = None


Nodes = Mapping[int, Table]
"""Tables by the size of the nodes."""


def needed(sequences: Sequences) -> dict[int, Stand]:
    """The trees that some step reads."""
    trees = {tree for step in sequences.steps if step.levels for tree in cover(step.sealed, sequences.block)}
    stands, base = {}, 0
    for size, some in groupby(sorted(trees, key=lambda tree: -tree[1]), lambda tree: tree[1]):
        starts = [start for start, _ in some]
        low, high = _number(min(starts), size), _number(max(starts), size)
        stands[size] = Stand(size, low, high - low + 1, base)
        base += stands[size].count * size
    return stands


def grow(sequences: Sequences, query: Tensor, key: Tensor, value: Tensor, impl: Impl = "auto") -> Forest:
    """The trees of scaled queries (H, gqa_ratio, Nq, D), keys (H, n, D) and values, in working precision.

    `impl`: "auto" and "native" take compiled kernels where they can read these. A choice: no gradient flows. Cost
    O(n log^2 n (D + Dv)) a head for a causal sequence, O(n log n (D + Dv)) for one forest; memory O(n log n).
    """
    stands, heads = needed(sequences), key.shape[0]
    if not stands:
        return Forest(torch.zeros((heads, 0), dtype=torch.int64, device=key.device), {})
    trees = [tree for stand in stands.values() for tree in stand.trees()]
    ends = torch.tensor([sum(tree) // sequences.block * sequences.is_causal for tree in trees], device=key.device)
    blocks, kind = ends.unique(return_inverse=True)
    metric = roots(sequences, query.detach(), blocks, by_kernels(impl, query.detach(), key.detach(), value.detach()))
    return Forest(order_of(trees, metric, kind, key, value, impl), stands)


def order_of(
    trees: Sequence[tuple[int, int]], metric: Tensor, kind: Tensor, key: Tensor, value: Tensor, impl: Impl = "auto"
) -> Tensor:
    """The order (H, R) of trees, tree after tree, of keys (H, n, D) and values.

    trees: the first sealed key and the size of each, those of equal size side by side. metric (H, E, D, D): roots; kind
    (trees,): which of them each is measured by. `impl`: as of `grow`.
    """
    key, value, metric = key.detach(), value.detach(), metric.to(key.dtype)
    if by_kernels(impl, key, value):
        start, size, base = _places(trees)
        return native.grow(key, value, metric, kind, size, start + SINKS, base, VALUES)
    found, done = [], 0
    for size, some in groupby(trees, lambda tree: tree[1]):
        starts = torch.tensor([start for start, _ in some], device=key.device)
        place = starts[:, None] + torch.arange(size, device=key.device) + SINKS
        own = metric[:, kind[done : done + len(starts)]].flatten(0, 1)
        rows = features(key[:, place].flatten(0, 1), value[:, place].flatten(0, 1), own)
        inner = split(rows).unflatten(0, (key.shape[0], len(starts)))
        found.append(place.expand(key.shape[0], -1, -1).gather(2, inner).flatten(1))
        done += len(starts)
    return torch.cat(found, 1)


def by_kernels(impl: Impl, *rows: Tensor) -> bool:
    """Whether compiled kernels grow trees of these: float32 that they can read."""
    return impl in COMPILED and all(one.dtype == torch.float32 for one in rows) and suits(*rows)


def _places(trees: Sequence[tuple[int, int]]) -> tuple[Tensor, Tensor, Tensor]:
    """Of every tree, the first sealed key, the number of keys, and the place in the order."""
    start, size = torch.tensor(trees, device="cpu").unbind(1)
    return start.contiguous(), size.contiguous(), size.cumsum(0) - size


def summarise(forest: Forest, key: Tensor, value: Tensor, impl: Impl = "auto") -> dict[int, Table]:
    """What is known of all nodes, of keys (H, n, D) and values in working precision. Gradients flow.

    `impl`: as of `grow`. Means and variances of a node are those of its children's means, and of their variances:
    `var = mean of var_c + mean of (mean_c - mean)^2`. Cost O(n log n (D + Dv)).
    """
    if forest.stands and impl in COMPILED and key.dtype == torch.float32 and readable(key, value):
        found: Sequence[Tensor] = _Summarised.apply(forest, key, value)  # type: ignore[no-untyped-call]
        return {size: Table(*found[3 * at : 3 * at + 3]) for at, size in enumerate(_sizes(forest))}
    return _summarise(forest, key, value)


def _sizes(forest: Forest) -> list[int]:
    """Those of the nodes, leaves first."""
    sizes = [LEAF]
    while sizes[-1] * BRANCH <= max(forest.stands):
        sizes.append(sizes[-1] * BRANCH)
    return sizes


class _Summarised(torch.autograd.Function):
    """Mean keys, mean values and variances, size after size, by compiled kernels; gradients by torch's operations."""

    @staticmethod
    def forward(ctx: Any, forest: Forest, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
        _, keys, base = _places(forest.trees())
        rows = {one: int(keys[keys >= one].sum()) // one for one in _sizes(forest)}
        tables = native.summarise(key, value, forest.order, keys, base, rows)
        ctx.forest = forest
        ctx.save_for_backward(key, value)
        return tuple(part for table in tables.values() for part in table)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        create_graph = torch.is_grad_enabled()
        with torch.enable_grad():
            key, value = (rows.view_as(rows).requires_grad_() for rows in ctx.saved_tensors)
            tables = (table for _, table in sorted(_summarise(ctx.forest, key, value).items()))
            parts = [part for table in tables for part in (table.key, table.value, table.variance)]
            return None, *torch.autograd.grad(parts, (key, value), gradients, create_graph=create_graph)


def _summarise(forest: Forest, key: Tensor, value: Tensor) -> dict[int, Table]:
    parts: dict[int, list[Table]] = {}
    for stand in forest.stands.values():
        size, last = LEAF, slice(stand.base, stand.base + stand.count * stand.size)
        index = forest.order[:, last]
        table = Table(take(key, index), take(value, index), key.new_zeros(()))
        while size <= stand.size:
            table = _above(table, LEAF if size == LEAF else BRANCH)
            parts.setdefault(size, []).append(table)
            size *= BRANCH
    return {
        size: Table(*(torch.cat([getattr(own, name) for own in some], 1) for name in ("key", "value", "variance")))
        for size, some in parts.items()
    }


def _above(table: Table, branch: int) -> Table:
    """The nodes of `branch` nodes each."""
    key, value = table.key.unflatten(1, (-1, branch)), table.value.unflatten(1, (-1, branch))
    mean = key.mean(2)
    variance = (key - mean.unsqueeze(2)).square().mean(2)
    if table.variance.dim():
        variance = variance + table.variance.unflatten(1, (-1, branch)).mean(2)
    return Table(mean, value.mean(2), variance)


def take(rows: Tensor, index: Tensor) -> Tensor:
    """Rows (H, R, X) at index (H, ...): (H, ..., X)."""
    heads, count, width = rows.shape
    first = torch.arange(heads, device=rows.device).mul_(count).view(-1, *[1] * (index.dim() - 1))
    flat = rows.reshape(heads * count, width).index_select(0, (index + first).flatten())
    return flat.view(*index.shape, width)
