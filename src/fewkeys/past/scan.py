"""The past of a causal plan, and how it moves on when a block of tokens is complete."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from fewkeys import native
from fewkeys.core.impl import Impl
from fewkeys.core.precision import working
from fewkeys.past.gradient import walk_with_gradient
from fewkeys.past.running import RunningKeys, RunningQueries
from fewkeys.past.summary import Summary
from fewkeys.sketch.backend import COMPILED
from fewkeys.sketch.clusters import LOWEST_LOG_WEIGHT, TILT


@dataclass(frozen=True, eq=False)
class Past:
    """Stand-ins of the keys let go so far, and moments of the queries seen so far."""

    summary: Summary
    queries: RunningQueries


@dataclass(frozen=True, eq=False)
class Leaving:
    """The keys that each step takes up: rows `index` (B, Hkv, steps, E), where `real`, of keys (B, Hkv, N, .)."""

    key: Tensor
    value: Tensor
    index: Tensor
    real: Tensor

    @staticmethod
    def all(key: Tensor, value: Tensor, real: Tensor) -> Leaving:
        """One step that takes up the real ones of these; `real` (B, Hkv, N)."""
        index = torch.arange(key.shape[2], device=key.device).expand(real.shape)
        return Leaving(key, value, index.unsqueeze(2), real.unsqueeze(2))

    def at(self, step: int) -> tuple[Tensor, Tensor, Tensor]:
        """Keys, values and which are real at a step, in working precision, the others zero."""
        real = self.real[:, :, step]
        # As many as this step needs: no shape may depend on what comes later.
        places = torch.arange(1, real.shape[-1] + 1, device=real.device)
        width = int((real * places).max()) if real.numel() else 0
        index, real = self.index[:, :, step, :width], real[:, :, :width]
        rows = [
            working(x.gather(2, index.unsqueeze(-1).expand(-1, -1, -1, x.shape[-1]))) * real.unsqueeze(-1)
            for x in (self.key, self.value)
        ]
        return rows[0], rows[1], real


@dataclass(frozen=True, eq=False)
class ByStep:
    """The stand-ins at the beginning and after every step: `Summary`'s tensors with a dimension of steps + 1."""

    rows: Tensor  # (B, Hkv, steps + 1, M, D + Dv)
    excess: Tensor  # (B, Hkv, steps + 1, M)
    size: Tensor


@dataclass(frozen=True, eq=False)
class Walk:
    """A past that moves on, block by block: every step first sees its queries, then takes up the keys that leave.

    Attributes:
        past: at the beginning.
        query: (B, Hq, steps S, D), S for every step.
        answered: (B, steps S): queries that count; None: all do.
        scale: on the queries.
        leaving: the keys that it takes up.
        tilted: as `Summary.absorb`.
        impl: as `Inputs.impl`.

    Sequential in the steps, parallel over heads. Cost O((M + E)^2 (D + Dv)) per step and head.
    """

    past: Past
    query: Tensor
    answered: Tensor | None
    scale: float
    leaving: Leaving
    tilted: bool
    impl: Impl = "auto"

    @cached_property
    def by_step(self) -> ByStep:
        """The stand-ins before and after every step."""
        return self.run()[0]

    @property
    def is_made(self) -> bool:
        """Whether somebody has asked for the stand-ins."""
        return "by_step" in self.__dict__  # where the property above keeps them

    @property
    def count(self) -> int:
        """Stand-ins at every step."""
        return self.past.summary.count

    def run(self) -> tuple[ByStep, Past]:
        """The stand-ins before and after every step, and the past at the end."""
        steps = self.steps()
        if self.impl in COMPILED and steps.readable:
            by_step, moved = native.walk(steps) if steps.suit else walk_with_gradient(steps)
            summary = Summary(moved[0], moved[1], moved[2], RunningKeys(*moved[3:7]))
            return ByStep(*by_step), Past(summary, RunningQueries(moved[7][:, :1], moved[8], moved[9]))
        summary, asked, leaving, answered = self.past.summary, self.past.queries, self.leaving, self.answered
        count = leaving.index.shape[2]
        size = self.query.shape[2] // count if count else 0
        scaled = working(self.query.detach()).unflatten(1, (leaving.key.shape[1], -1)) * self.scale
        found = [summary]
        for step in range(count):
            part = slice(step * size, (step + 1) * size)
            asked = asked.add(scaled[:, :, :, part], None if answered is None else answered[:, part])
            key, value, real = leaving.at(step)
            if key.shape[2]:
                summary = summary.absorb(key, value, real, asked.moments(), tilted=self.tilted)
            found.append(summary)
        parts = zip(*((one.rows, one.excess, one.size) for one in found), strict=True)
        return ByStep(*(torch.stack(part, 2) for part in parts)), Past(summary, asked)

    def steps(self) -> native.Steps:
        """The same for compiled kernels."""
        summary, asked, leaving = self.past.summary, self.past.queries, self.leaving
        seen = summary.seen
        return native.Steps(
            (
                *(summary.rows, summary.excess, summary.size, seen.count, seen.key, seen.value, seen.square),
                *(asked.count.expand(seen.count.shape), asked.total, asked.square),
            ),
            self.query.detach(),
            self.answered,
            self.scale,
            (leaving.key, leaving.value, leaving.index, leaving.real),
            self.tilted,
            TILT,
            LOWEST_LOG_WEIGHT,
        )
