"""Buckets of a random angular hash."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from experiments.sparsefinder.baselines.draws import normal
from torch import Tensor

from fewkeys.core.graph import Graph
from fewkeys.core.inputs import Inputs
from fewkeys.core.validation import check_count
from fewkeys.core.work import Work
from fewkeys.papers.sparsefinder.groups import Groups
from fewkeys.papers.sparsefinder.space import Projection, check_space, projected, space_work
from fewkeys.select.base import Selector


@dataclass(frozen=True)
class Reformer(Selector, listed=True):
    """(i, j) is an edge when `h_r(q_i) = h_r(k_j)` in any round r, `h_r(x) = argmax [x R_r, -x R_r]`.

    R_r (D, buckets / 2) is Gaussian, drawn anew for every round from the call's generator, the same for all sequences
    and heads. The paper ties keys to queries (`k = q / |q|`); here both are hashed, and their lengths do not matter.
    The exclusion of a query's own key belongs to the tie and is left out. The chunks of equal size are left out, too:
    buckets run as they are, so the rule is strictly causal.

    Args:
        buckets: an even number.
        rounds: hashes drawn.
        project: the space in which q and k are hashed; None: as they are.

    Cost O(n rounds (D buckets + n D / buckets)) where buckets fill evenly; quadratic where one holds all tokens.

    Source: Kitaev, Kaiser, Levskaya, Reformer (arXiv 2001.04451), section 2, equations 3 to 6.
    """

    buckets: int
    rounds: int = 1
    project: Projection | None = None

    causal = True

    def __post_init__(self) -> None:
        check_count("Reformer rounds", self.rounds)
        if check_count("Reformer buckets", self.buckets, least=2) % 2:
            raise ValueError(f"Reformer buckets: expected an even number, got {self.buckets}; add one")
        check_space(self.project)

    def select(self, inputs: Inputs) -> Graph:
        query, key = projected(inputs, self.project)
        rotations = normal(inputs, (self.rounds, query.shape[-1], self.buckets // 2), query)
        query, key = (self._hash(rows, rotations) for rows in (query, key))
        return Graph(inputs, extra=Groups(query, key, self.rounds * self.buckets))

    def _hash(self, rows: Tensor, rotations: Tensor) -> Tensor:
        """Ids (B, H, N, rounds): round r has buckets r * buckets .. (r + 1) * buckets - 1."""
        ids = []
        for number, rotation in enumerate(rotations):
            turned = rows @ rotation
            ids.append(torch.cat([turned, -turned], -1).argmax(-1) + number * self.buckets)
        return torch.stack(ids, -1)

    def covers(self, inputs: Inputs) -> bool:
        return False

    def work(self, inputs: Inputs) -> Work:
        rank, prepare = space_work(inputs, self.project)
        hashing = 2.0 * self.rounds * rank * self.buckets * inputs.gqa_ratio
        return Work(self.rounds * inputs.keys / self.buckets, prepare + hashing)
