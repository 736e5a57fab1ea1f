"""Queries, keys and values constructed to break an error bar, and random ones as a control."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from experiments.decoders.bars import error_bars
from torch import Tensor

import fewkeys as fk
from fewkeys.core.metrics import relative_error
from fewkeys.sketch.codes import Frame, rotated, signs

KEYS, DIM = 512, 64
SHIFT = 10.0
"""All keys are shifted by this much, which leaves all weights as they are."""


@dataclass(frozen=True, eq=False)
class Hard:
    """One query, whose scores have the scale 1, and the plan of the keys that it keeps."""

    query: Tensor
    key: Tensor
    value: Tensor
    plan: fk.Plan

    @property
    def exact(self) -> Tensor:
        return fk.attention(self.query, self.key, self.value, scale=1.0)

    def missed(self, trials: int, **options: float) -> dict[str, float]:
        """Shares of `trials`: the bar is below the error, the bar reached the error asked for, both."""
        exact, missed, reached, both = self.exact, 0, 0, 0
        for seed in range(trials):
            generator = torch.Generator().manual_seed(seed)
            tensors = (self.query, self.key, self.value, self.plan)
            bars = error_bars(*tensors, scale=1.0, generator=generator, **options)
            below = bool(relative_error(bars.output, exact) > bars.error + 1e-5)
            missed, reached = missed + below, reached + bool(bars.reached)
            both += below and bool(bars.reached)
        return {"missed": missed / trials, "reached": reached / trials, "missed_and_reached": both / trials}


def _normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def _of(score: Tensor, value: Tensor, length: float = 2.0, aside: Tensor | None = None, sinks: int = 4) -> Hard:
    """Keys (N, D) of these scores (N,) and this length at right angles to the query. The plan keeps the first keys."""
    query = torch.nn.functional.normalize(_normal(DIM, seed=1), dim=0)
    aside = _normal(len(score), DIM) if aside is None else aside
    aside = torch.nn.functional.normalize(aside - (aside @ query).unsqueeze(-1) * query, dim=-1)
    key = length * aside + score.unsqueeze(-1) * query + SHIFT * query.flip(0)
    return Hard(query[None, None, None], key[None, None], value[None, None], fk.Plan(fk.Sinks(sinks)))


def random() -> Hard:
    return _of(_normal(KEYS, seed=2), 1 + _normal(KEYS, DIM, seed=3))


def along_a_line() -> Hard:
    """Values that differ in one coordinate only: no vectors of the same variance have larger outliers."""
    value = torch.ones(KEYS, 4)
    value[:, 0] += 0.7 * _normal(KEYS, seed=3)
    return _of(_normal(KEYS, seed=2), value)


def divided() -> Hard:
    """Half of the keys are kept and the others have other values, so an error in the sum of the weights counts too."""
    value = 1 + 0.3 * _normal(KEYS, DIM, seed=3)
    value[KEYS // 2 :] += 2
    return _of(_normal(KEYS, seed=2), value, sinks=KEYS // 2)


def rare(share: float, length: float = 2.0) -> Hard:
    """One key has this share of the weight, and the opposite value of all others."""
    score, value = torch.zeros(KEYS), torch.ones(KEYS, 4)
    score[300] = torch.tensor(share / (1 - share) * (KEYS - 1)).log()
    value[300] = -1
    return _of(score, value, length)


def hidden() -> Hard:
    """A key has half the weight, and its code in the package's rotation has the score of the others.

    The rotated query is constant; three quarters of the rotated key's numbers are 0.98 sigma, which codes as 0.5, the
    others -1.02, which codes as -1.5: its mean is 0.48 sigma, that of its code zero.
    """
    query, sign = torch.zeros(DIM), signs(DIM, torch.device("cpu"))
    query[0] = sign[0]
    key, value = 0.5 * _normal(KEYS, DIM), torch.ones(KEYS, 4)
    whole = torch.full((DIM,), 0.98)
    whole[::4] = -1.02
    aside = sign * rotated(sign * whole) / DIM
    others = (key[torch.arange(KEYS) != 300] @ query).exp().sum().log()
    middle = Frame.of(key[None, None]).middle[0, 0, 0]
    key[300] = middle + aside * (others - middle @ query) / (aside @ query)
    value[300] = 3
    plan = fk.Plan(fk.KeyScan(16), fk.BlockMeans(1))
    return Hard(query[None, None, None], key[None, None], value[None, None], plan)


def copies() -> Hard:
    """Two keys, each repeated many times: all copies have the same rounding error."""
    aside = _normal(2, DIM)[torch.arange(KEYS) % 8 // 7]
    value = torch.where((torch.arange(KEYS) % 8 == 7).unsqueeze(-1), -1.0, torch.ones(KEYS, 4))
    return _of(torch.zeros(KEYS), value, 6.0, aside)


def long_value() -> Hard:
    """A key with a hundredth of the weight has a value fifty times as long."""
    value = torch.ones(KEYS, 4)
    value[300] = -50
    score = torch.zeros(KEYS)
    score[300] = torch.tensor(KEYS / 100).log()
    return _of(score, value)


def cancelling() -> Hard:
    """Values that nearly cancel: the output is short, so its relative error is large."""
    value = torch.ones(KEYS, 4)
    value[::2] = -1
    value[1] = 2
    return _of(_normal(KEYS, seed=2).sort().values, value)


HARD: dict[str, Callable[[], Hard]] = {
    "random keys": random,
    "values along a line": along_a_line,
    "half of the keys are kept, the others have other values": divided,
    **{f"one key has {share:.1%}, with the opposite value": lambda s=share: rare(s) for share in (0.005, 0.02, 0.1)},
    "one key has 0.5%, codes are off by a unit of score": lambda: rare(0.005, 25.0),
    "one key has 2.0%, codes are off by three units": lambda: rare(0.02, 70.0),
    "half the weight on a key that the scan's code hides": hidden,
    "two keys, many times": copies,
    "one key with a value 50 times as long": long_value,
    "values that cancel": cancelling,
}
