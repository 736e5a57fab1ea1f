"""A fixed number of stand-ins for all keys that a causal plan has evicted."""

from dataclasses import dataclass
from typing import ClassVar, cast

import torch

from fewkeys.core.graph import Columns, Graph
from fewkeys.core.inputs import Inputs
from fewkeys.core.weights import Softmax, Weights
from fewkeys.core.work import Work
from fewkeys.past.scan import scan
from fewkeys.rest.base import BlockStandIns, CountedRest
from fewkeys.select.base import Recent, Selector


@dataclass(frozen=True)
class RunningMeans(CountedRest):
    """`count` stand-ins for all keys of the past that are not kept; strictly causal, and of fixed size in a stream.

    Beside `RecentBlocks`, with or without `Sinks`. When a block of queries begins, a summary of `count` means absorbs
    the keys that no list holds any more, and merges the means whose merging costs least in the metric of earlier
    queries (`fewkeys.past.summary` has the equations). Sequences may come whole, in pieces (`fewkeys.stream`) or token
    by token.

    Memory for a whole sequence is count / block times that of the keys and values. Slots: count. Cost
    O(n (count + block)^2 / block (D + Dv)). Gradients flow through the means, not through clusters and weights.
    """

    causal: ClassVar[bool] = True
    needs_causal: ClassVar[bool] = True

    def work(self, inputs: Inputs, keep: Selector) -> Work:
        block = _recent(keep)[0].size
        pairs = (self.count + block) ** 2 / block
        return Work(float(self.count), 2.0 * pairs * (inputs.head_dim + inputs.value_dim))

    @property
    def running(self) -> int:
        return self.count

    def check_beside(self, keep: Selector) -> None:
        remembered = [part.remembered for part in keep.parts]
        if len(_recent(keep)) != 1 or any(part is None or part.latest for part in remembered):
            raise ValueError(
                "keep: RunningMeans takes up whole blocks of keys as they leave RecentBlocks; expected one "
                f"RecentBlocks and, beside it, Sinks, got {keep}"
            )

    def prepare(self, inputs: Inputs, graph: Graph, weights: Weights) -> BlockStandIns:
        x, columns = inputs, cast("Columns", graph.columns)
        real = (torch.arange(x.queries, device=x.query.device) >= x.placeholders).expand(x.batch, -1)
        if x.valid_queries is not None:
            real = real & x.valid_queries
        rows, excess, size = scan(self.count, x, columns, real, tilted=isinstance(weights, Softmax))
        key, value = rows.split([x.head_dim, x.value_dim], -1)
        return BlockStandIns(key, value, excess, size)


def _recent(keep: Selector) -> list[Recent]:
    remembered = (part.remembered for part in keep.parts)
    return [part.recent for part in remembered if part is not None and part.recent is not None]
