"""Controls for every comparison."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fewkeys.core.graph import Graph
from fewkeys.core.inputs import Inputs
from fewkeys.core.validation import check_drawn_once
from fewkeys.core.work import PER_SORTED, Work
from fewkeys.select.base import CountedSelector, Sharded
from fewkeys.select.causal import running_top


@dataclass(frozen=True)
class _Control(CountedSelector, ABC):
    causal = True

    @abstractmethod
    def score(self, inputs: Inputs) -> Tensor:
        """(B, Hkv, Nk), of each key whatever the others are."""

    @property
    def sharded(self) -> Sharded:
        return Sharded(self.score, self.count)

    def select(self, inputs: Inputs) -> Graph:
        if inputs.is_causal:
            scores = self.score(inputs)
            return running_top(inputs, self.count, lambda key, index: scores.gather(-1, index))
        return self.sharded.graph(inputs)


@dataclass(frozen=True)
class KeyNorm(_Control):
    """The `count` keys of largest Euclidean norm, shared by all queries. Cost O(n D)."""

    def score(self, inputs: Inputs) -> Tensor:
        norm: Tensor = torch.linalg.vector_norm(inputs.key.detach(), dim=-1, dtype=torch.float64)
        return norm

    def work(self, inputs: Inputs) -> Work:
        return Work(float(self.count), 2.0 * inputs.head_dim)


@dataclass(frozen=True)
class RandomKeys(_Control):
    """`count` keys drawn by the call's `generator` uniformly without replacement, per head, shared by all queries."""

    def score(self, inputs: Inputs) -> Tensor:
        x, first = inputs, inputs.whole.first_key
        # Drawn by every process for all keys, one key after the other.
        return uniform(x, (x.whole.keys, x.batch, x.kv_heads))[first : first + x.keys].movedim(0, -1)

    def work(self, inputs: Inputs) -> Work:
        return Work(float(self.count), PER_SORTED)


def generator_of(inputs: Inputs) -> torch.Generator:
    """The call's generator, or a new one with seed 0."""
    check_drawn_once(inputs.generator)
    return inputs.generator or torch.Generator("cpu").manual_seed(0)


def uniform(inputs: Inputs, shape: Sequence[int], generator: torch.Generator | None = None) -> Tensor:
    """Uniform numbers in [0, 1), float32, drawn by the generator (default: `generator_of`)."""
    generator = generator or generator_of(inputs)
    drawn = torch.rand(shape, generator=generator, device=generator.device, dtype=torch.float32)
    return drawn.to(inputs.query.device)
