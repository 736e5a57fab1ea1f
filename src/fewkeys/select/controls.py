"""The controls that belong in every comparison: keys of large norm, and random keys."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fewkeys.graph import Graph
from fewkeys.inputs import Inputs
from fewkeys.select.base import Selector, shared_top
from fewkeys.select.causal import running_top
from fewkeys.sketch.gram import working
from fewkeys.validation import check_count


class _ScoreOnce(Selector):
    """Keys of largest score, where a key's score depends on nothing but the key itself."""

    count: int

    def __post_init__(self) -> None:
        check_count(f"{type(self).__name__} count", self.count)

    def score(self, inputs: Inputs) -> Tensor:
        """Scores (B, Hkv, Nk)."""
        raise NotImplementedError

    def select(self, inputs: Inputs) -> Graph:
        score = self.score(inputs)
        if inputs.is_causal:
            return running_top(inputs, lambda index, stop: score.gather(-1, index), self.count)
        return shared_top(inputs, score, self.count)

    def covers(self, inputs: Inputs) -> bool:
        return self.count >= inputs.keys


@dataclass(frozen=True)
class KeyNorm(_ScoreOnce):
    """The `count` keys of largest Euclidean norm, shared by all queries. Cost O(n D)."""

    count: int

    def score(self, inputs: Inputs) -> Tensor:
        return working(inputs.key.detach()).square().sum(-1)


@dataclass(frozen=True)
class RandomKeys(_ScoreOnce):
    """`count` keys drawn uniformly without replacement, per sequence and head, shared by all queries.

    The draw comes from the `generator` of the call (seed 0 if none is given) and does not look at the data.
    """

    count: int

    def score(self, inputs: Inputs) -> Tensor:
        return uniform(inputs, (inputs.batch, inputs.kv_heads, inputs.keys))


def uniform(inputs: Inputs, shape: tuple[int, ...]) -> Tensor:
    """Uniform numbers in [0, 1) from the call's generator, on the problem's device."""
    generator = inputs.generator
    if generator is None:
        generator = torch.Generator().manual_seed(0)
    return torch.rand(shape, generator=generator, device=generator.device).to(inputs.query.device)
