"""Controls for every comparison."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fewkeys.core.graph import Graph
from fewkeys.core.inputs import Inputs
from fewkeys.core.precision import working
from fewkeys.core.validation import check_drawn_once
from fewkeys.core.work import PER_SORTED, Work
from fewkeys.select.base import CountedSelector, Sharded, shared_top
from fewkeys.select.causal import OnlineScore, running_top


@dataclass(frozen=True)
class KeyNorm(CountedSelector):
    """The `count` keys of largest Euclidean norm, shared by all queries. Cost O(n D)."""

    causal = True

    @property
    def sharded(self) -> Sharded:
        return Sharded(score=_norms, count=self.count)

    def work(self, inputs: Inputs) -> Work:
        return Work(float(self.count), 2.0 * inputs.head_dim)

    def select(self, inputs: Inputs) -> Graph:
        if inputs.is_causal:
            return running_top(inputs, _Norms(), self.count)
        return shared_top(inputs, _norms(inputs), self.count)


@dataclass(frozen=True)
class RandomKeys(CountedSelector):
    """`count` keys drawn by the call's `generator` uniformly without replacement, per head, shared by all queries."""

    causal = True

    @property
    def sharded(self) -> Sharded:
        return Sharded(score=_draws, count=self.count)

    def work(self, inputs: Inputs) -> Work:
        return Work(float(self.count), PER_SORTED)

    def select(self, inputs: Inputs) -> Graph:
        if inputs.is_causal:
            return running_top(inputs, _Draws(inputs), self.count)
        return shared_top(inputs, _draws(inputs), self.count)


class _Norms(OnlineScore):
    def offer(self, key: Tensor, real: Tensor) -> Tensor:
        return key.double().square().sum(-1)


class _Draws(OnlineScore):
    def __init__(self, inputs: Inputs) -> None:
        self.inputs, self.generator = inputs, generator_of(inputs)

    def offer(self, key: Tensor, real: Tensor) -> Tensor:
        return uniform(self.inputs, key.shape[:3], self.generator).to(key.dtype)


def _norms(inputs: Inputs) -> Tensor:
    return working(inputs.key.detach()).square().sum(-1)


def _draws(inputs: Inputs) -> Tensor:
    x = inputs
    drawn = uniform(x, (x.batch, x.kv_heads, x.whole.keys))  # by every process for all keys, as one would
    return drawn[..., x.whole.first_key : x.whole.first_key + x.keys]


def generator_of(inputs: Inputs) -> torch.Generator:
    """The call's generator, or a new one with seed 0."""
    check_drawn_once(inputs.generator)
    return inputs.generator or torch.Generator("cpu").manual_seed(0)


def uniform(inputs: Inputs, shape: Sequence[int], generator: torch.Generator | None = None) -> Tensor:
    """Uniform numbers in [0, 1), float32, drawn by the generator (default: `generator_of`)."""
    generator = generator or generator_of(inputs)
    drawn = torch.rand(shape, generator=generator, device=generator.device, dtype=torch.float32)
    return drawn.to(inputs.query.device)
