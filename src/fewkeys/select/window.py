"""Keys near the query, and the first keys of the sequence."""

from dataclasses import dataclass

import torch

from fewkeys.core.graph import Columns, Graph, band_block
from fewkeys.core.inputs import Inputs
from fewkeys.core.rows import marked_places
from fewkeys.core.validation import check_count
from fewkeys.core.work import Work
from fewkeys.select.base import CountedSelector, Remembered, Selector


@dataclass(frozen=True)
class Window(Selector):
    """The `size` keys around the position of the query, fewer at the ends of the sequence. Cost O(n size).

    Query i keeps keys i - size // 2 .. i + (size - 1) // 2; under causality the `size` latest, i - size + 1 .. i.
    """

    size: int

    causal = True
    beside_cohorts = True

    def __post_init__(self) -> None:
        check_count("Window size", self.size)

    def select(self, inputs: Inputs) -> Graph:
        return Graph(inputs, band=(self.size - 1, 0) if inputs.is_causal else (self.size // 2, (self.size - 1) // 2))

    def covers(self, inputs: Inputs) -> bool:
        reach = self.size if inputs.is_causal else (self.size - 1) // 2
        return reach >= max(inputs.queries + inputs.offset, inputs.keys)

    def work(self, inputs: Inputs) -> Work:
        # A block of queries scores the keys that any of them keeps.
        return Work(float(band_block(self.size - 1) + self.size - 1), banded=True)

    @property
    def remembered(self) -> Remembered:
        return Remembered(latest=self.size)


@dataclass(frozen=True)
class Sinks(CountedSelector):
    """The first `count` real keys of every sequence (StreamingLLM's attention sinks, arXiv 2309.17453)."""

    causal = True
    beside_cohorts = True

    def select(self, inputs: Inputs) -> Graph:
        count, shape = min(self.count, inputs.keys), (inputs.batch, inputs.kv_heads, -1)
        if inputs.valid is None:
            index = torch.arange(count, device=inputs.key.device).expand(shape)
            used = torch.ones_like(index, dtype=torch.bool)
        else:
            order = marked_places(inputs.valid, least=count)[:, :count]
            index = order[:, None].expand(shape)
            used = inputs.valid.gather(-1, order)[:, None].expand(shape)
        return Graph(inputs, columns=Columns.shared(index, used, inputs.queries))

    def work(self, inputs: Inputs) -> Work:
        return Work(float(self.count))

    @property
    def remembered(self) -> Remembered:
        return Remembered(first=self.count)
