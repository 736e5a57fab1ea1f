"""What every executor is given: all that was chosen, so that nothing but attending is left."""

from __future__ import annotations

from dataclasses import dataclass

from fewkeys.core.graph import Graph
from fewkeys.core.inputs import Inputs
from fewkeys.core.weights import Weights
from fewkeys.rest.base import BlockStandIns, NodeStandIns, StandIns


@dataclass(frozen=True, eq=False)
class Problem:
    """Queries, keys and values; the edges between them; what stands in for the other keys; how scores become weights.

    `graph` is of `inputs`, whose `impl` names the executor.
    """

    inputs: Inputs
    graph: Graph
    stand_ins: StandIns | BlockStandIns | NodeStandIns | None
    weights: Weights

    @property
    def by_block(self) -> bool:
        """Whether blocks of queries have lists or means of their own."""
        columns = self.graph.columns
        return isinstance(self.stand_ins, BlockStandIns) or (columns is not None and columns.blocks > 1)
