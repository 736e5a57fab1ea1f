"""Which queries see which forest: sequences are cut into steps, in each of which all queries see the same keys sealed.

Positions are counted over real keys: padding, wherever it stands, is as if it had been deleted. Under causality the
query at position p (its own key being the p-th real one) sees `sealed(p) = floor((p - sinks) / block) block` keys in
trees; without, every query sees as many whole blocks as there are.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fewkeys.core.inputs import Inputs
from fewkeys.core.precision import working
from fewkeys.tree.rule import SINKS, Level, exact_keys, levels_of


@dataclass(frozen=True)
class Step:
    """Queries start .. stop - 1, the last of which sees `seen` keys: the first `sealed` after the sinks by `levels`,
    or all of them exactly where there are no levels.
    """

    start: int
    stop: int
    seen: int
    sealed: int
    levels: tuple[Level, ...]

    @property
    def near(self) -> int:
        """The first key after the sinks that is kept by all queries which see it."""
        return SINKS + self.sealed if self.levels else min(SINKS, self.seen)


@dataclass(frozen=True, eq=False)
class Sequences:
    """Sequences of a batch whose real keys stand at the same places; with their key heads, H together.

    `batch` (S,): which; None: all. `real` (n,): the places of the real keys; None: all are. `seen` (Nq,): how many of
    them each query sees. `asking` (N,): the queries that belong to real tokens. `is_causal`: as of the inputs.
    """

    batch: Tensor | None
    real: Tensor | None
    seen: Tensor
    asking: Tensor
    is_causal: bool
    block: int
    steps: tuple[Step, ...]

    def rows(self, tensor: Tensor) -> Tensor:
        """Real keys or values (H, n, X) of (B, Hkv, Nk, X), in working precision."""
        own = tensor if self.batch is None else tensor[self.batch]
        return working((own if self.real is None else own[:, :, self.real]).flatten(0, 1))

    def queries(self, inputs: Inputs) -> Tensor:
        """Scaled queries (H, gqa_ratio, Nq, D) by the key head that they read, in working precision."""
        query = inputs.grouped_query()
        return working((query if self.batch is None else query[self.batch]).flatten(0, 1)) * inputs.scale


def sequences_of(inputs: Inputs, slots: int, block: int) -> tuple[Sequences, ...]:
    """The sequences of a batch, those of equal padding together."""
    x, device = inputs, inputs.key.device
    own = torch.arange(x.queries, device=device)
    last = (own + x.offset).clamp_max(x.keys - 1) if x.is_causal else torch.full_like(own, x.keys - 1)
    if x.valid is None:
        seen = last + 1
        return (Sequences(None, None, seen, own, x.is_causal, block, steps_of(seen, x.is_causal, slots, block)),)
    kinds, kind = x.valid.unique(dim=0, return_inverse=True)
    found = []
    for index, valid in enumerate(kinds):
        seen = valid.cumsum(0)[last]
        asking = own if x.valid_queries is None else own[valid]
        steps = steps_of(seen, x.is_causal, slots, block)
        batch, real = (kind == index).nonzero().squeeze(-1), valid.nonzero().squeeze(-1)
        found.append(Sequences(batch, real, seen, asking, x.is_causal, block, steps))
    return tuple(found)


def steps_of(seen: Tensor, is_causal: bool, slots: int, block: int) -> tuple[Step, ...]:
    """The steps of queries that see so many keys, (Nq,), ascending."""
    sealed = (seen - int(is_causal) - SINKS).clamp_min(0) // block * block
    found, start = [], 0
    kinds, counts = sealed.unique_consecutive(return_counts=True)
    stops = counts.cumsum(0)
    for kind, stop, most in zip(kinds.tolist(), stops.tolist(), seen[stops - 1].tolist(), strict=True):
        exact = exact_keys(block) if is_causal else min(SINKS, most) + max(0, most - SINKS - kind)
        found.append(Step(start, stop, most, kind, levels_of(slots, kind, exact, block)))
        start = stop
    return tuple(found)


def steps_after(past: int, count: int, slots: int, block: int) -> tuple[Step, ...]:
    """The same of `count` causal queries in a row, after `past` keys."""
    found, start = [], 0
    while start < count:
        sealed = max(0, past + start - SINKS) // block * block
        stop = min(count, SINKS + sealed + block - past)
        levels = levels_of(slots, sealed, exact_keys(block), block)
        found.append(Step(start, stop, past + stop, sealed, levels))
        start = stop
    return tuple(found)
