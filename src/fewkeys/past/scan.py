"""The scan: how the past of a causal plan moves on, block by block, each time one is complete."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fewkeys.core.fields import Fields
from fewkeys.core.impl import COMPILED, Impl
from fewkeys.core.precision import working
from fewkeys.past import native
from fewkeys.past.evicted import Evicted
from fewkeys.past.gradient import scan_with_gradient
from fewkeys.past.running import RunningKeys, RunningQueries
from fewkeys.past.state import State
from fewkeys.past.summary import Summary
from fewkeys.sketch.clusters import LOWEST_LOG_WEIGHT, TILT


@dataclass(frozen=True, eq=False)
class States(Fields):
    """The stand-ins at the beginning and after every step: `Summary`'s tensors with a dimension of steps + 1."""

    rows: Tensor  # (B, Hkv, steps + 1, M, D + Dv)
    excess: Tensor  # (B, Hkv, steps + 1, M)
    size: Tensor


@dataclass(frozen=True, eq=False)
class Scan:
    """`s_t = absorb(s_(t-1), evicted_t)` under the moments of all queries up to block t, for every step t.

    Attributes:
        state: s_0, of which the summary and the moments of queries count.
        query: (B, Hq, steps S, D), S for every step.
        answered: (B, steps S): queries that count; None: all do.
        scale: on the queries.
        evicted: the keys that each step absorbs.
        tilted: as `Summary.absorb`.
        impl: as `Inputs.impl`: "native" is compiled, "auto" where that suits, the others are steps of torch.

    Sequential in the steps, parallel over heads. Cost O((M + E)^2 (D + Dv)) per step and head. Raises `ValueError` for
    an unknown `impl`, and for "native" where kernels cannot take the tensors, with the reason.
    """

    state: State
    query: Tensor
    answered: Tensor | None
    scale: float
    evicted: Evicted
    tilted: bool
    impl: Impl = "auto"

    def run(self) -> tuple[States, State]:
        """The stand-ins before and after every step, and the state at the end."""
        if self.impl in COMPILED:
            steps = self.steps()
            reason = steps.unsupported
            if reason is None:
                return self._by_kernels(steps)
            if self.impl == "native":
                raise ValueError(f"impl='native': {reason}; use impl='torch'")
        return self._by_torch()

    def _by_kernels(self, steps: native.Steps) -> tuple[States, State]:
        states, last = native.scan(steps) if steps.suit else scan_with_gradient(steps)
        summary = Summary(last[0], last[1], last[2], RunningKeys(*last[3:7]))
        queries = RunningQueries(last[7][:, :1], last[8], last[9])
        return States(*states), replace(self.state, summary=summary, queries=queries)

    def _by_torch(self) -> tuple[States, State]:
        summary, queries, evicted, answered = self.state.summary, self.state.queries, self.evicted, self.answered
        size = self.query.shape[2] // max(1, evicted.steps)
        scaled = working(self.query.detach()).unflatten(1, (evicted.key.shape[1], -1)) * self.scale
        summaries = [summary]
        for step in range(evicted.steps):
            part = slice(step * size, (step + 1) * size)
            queries = queries.add(scaled[:, :, :, part], None if answered is None else answered[:, part])
            key, value, real = evicted.at(step)
            if key.shape[2]:
                summary = summary.absorb(key, value, real, queries.moments(), tilted=self.tilted)
            summaries.append(summary)
        parts = zip(*((one.rows, one.excess, one.size) for one in summaries), strict=True)
        states = States(*(torch.stack(part, 2) for part in parts))
        return states, replace(self.state, summary=summary, queries=queries)

    def steps(self) -> native.Steps:
        """The same for compiled kernels."""
        summary, queries, evicted = self.state.summary, self.state.queries, self.evicted
        seen = summary.seen
        return native.Steps(
            (
                *(summary.rows, summary.excess, summary.size, seen.count, seen.key, seen.value, seen.square),
                *(queries.count.expand(seen.count.shape), queries.total, queries.square),
            ),
            self.query.detach(),
            self.answered,
            self.scale,
            (evicted.key, evicted.value, evicted.index, evicted.real),
            self.tilted,
            TILT,
            LOWEST_LOG_WEIGHT,
        )


def advance(state: State, evicted: Evicted, unit: int, *, tilted: bool, impl: Impl = "auto") -> tuple[States, State]:
    """The state when units of positions are complete: their queries are known, their evicted keys absorbed.

    evicted: what leaves at the end of each of the units, which began at `state.moved`. Also returns the stand-ins
    before and after every unit. Near tokens stay: `State.trim` forgets those that no query will reach.
    """
    done = evicted.steps * unit
    query, answered = state.asked[:, :, :, :done].flatten(1, 2), state.answered[:, :done]
    states, after = Scan(state, query, answered, 1.0, evicted, tilted, impl).run()
    asked, answered = state.asked[:, :, :, done:], state.answered[:, done:]
    return states, replace(after, moved=state.moved + done, asked=asked, answered=answered)
