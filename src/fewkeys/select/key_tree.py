"""The keys that each query finds for itself, in a forest of balanced trees over all keys."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from fewkeys.core.graph import Graph
from fewkeys.core.inputs import Inputs
from fewkeys.core.validation import check_count, check_real
from fewkeys.core.work import PER_SORTED, Work, per_score
from fewkeys.select.base import Remembered, Selector
from fewkeys.tree.descent import Descent
from fewkeys.tree.enough import Enough
from fewkeys.tree.rule import LEAST, SINKS, Level, block_of, exact_keys, levels_of, scored


@dataclass(frozen=True)
class KeyTree(Selector):
    """The first 4 keys, the query's own unsealed block, and the leaves that the query opens in a forest of all others.

    Keys are sealed 32 at a time (16 for at most 128 slots), at absolute positions; sealed keys stand in balanced
    trees, which depend on keys, values and queries up to their own end only. A query scores the nodes of the coarsest
    level, opens the best, and so on down to leaves of 8 keys, which it keeps (`fewkeys.tree`). Strictly causal; without
    causality one forest holds all keys. Positions are counted over real keys, so padding is as if deleted. Queries
    before `query_offset` are not known, so they have no part in the shape of the trees.

    `slots`, at least 64, pay for kept keys and for every node scored, opened or not; on average over a block of queries
    they are not exceeded (but by 64 slots beyond 65,536 keys), by a single query by at most half a block.
    With `mass`, such as 0.99, a query opens no more once the nodes that it leaves closed hold an estimated 1 - mass of
    its softmax mass, and `slots` are the most that it pays; with `certified`, once they provably do
    (`fewkeys.tree.enough` has both, and what they cost). `Graph.slots` and `fewkeys.explain` tell how many it took.
    `rest=TreeMeans()` lets the unopened nodes stand in. Query heads that share keys open their own leaves. Cost
    O(n log^2 n (D + Dv)) for building, O(slots D) a query.
    """

    slots: int
    mass: float | None = None
    certified: bool = False
    by_real_place: ClassVar[bool] = True

    causal = True

    def __post_init__(self) -> None:
        check_count("KeyTree slots", self.slots, least=LEAST)
        if self.mass is not None and not 0 < check_real("KeyTree mass", self.mass) < 1:
            raise ValueError(f"KeyTree mass: expected a share between 0 and 1, such as 0.99, got {self.mass}")
        if not isinstance(self.certified, bool):
            raise TypeError(f"KeyTree certified: expected a bool, got {type(self.certified).__name__}")
        if self.certified and self.mass is None:
            raise ValueError("KeyTree certified: expected a mass to certify, got None; give mass=0.9")

    @property
    def enough(self) -> Enough | None:
        """When a query stops before its slots are spent."""
        return None if self.mass is None else Enough(self.mass, self.certified)

    def select(self, inputs: Inputs) -> Graph:
        return Graph(inputs, descent=Descent.of(inputs, self.slots, self.enough))

    @property
    def remembered(self) -> Remembered:
        return Remembered(first=SINKS, tree=self.slots, enough=self.enough)

    def covers(self, inputs: Inputs) -> bool:
        return not self._levels(inputs)

    def work(self, inputs: Inputs) -> Work:
        x, levels = inputs, self._levels(inputs)
        if not levels:
            return Work(float(x.keys))
        # A node's mean and its variances are two products of D; a key's are one of D and one of Dv.
        means = scored(levels) * (4 * x.head_dim) / per_score(x)
        depth = math.log2(max(2, x.keys / 8))
        trees = depth / 4 if x.is_causal else 1.0
        passes = 2.0 * 10 * (x.head_dim + x.value_dim) + 3 * PER_SORTED
        return Work(self.slots - scored(levels) + means, trees * depth * passes)

    def _levels(self, inputs: Inputs) -> tuple[Level, ...]:
        """Those of the query that sees most; none where it keeps every key."""
        x, block = inputs, block_of(self.slots)
        seen = min(x.keys, x.queries + x.offset) if x.is_causal else x.keys
        sealed = max(0, seen - x.is_causal - SINKS) // block * block
        exact = exact_keys(block) if x.is_causal else seen - sealed
        return levels_of(self.slots, sealed, exact, block)
