"""The scan: how the past of a causal plan moves on, block by block, each time one is complete."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fewkeys.core.fields import Fields
from fewkeys.core.precision import working
from fewkeys.past.evicted import Evicted
from fewkeys.past.state import State


@dataclass(frozen=True, eq=False)
class States(Fields):
    """The stand-ins at the beginning and after every step: `Summary`'s tensors with a dimension of steps + 1."""

    rows: Tensor  # (B, Hkv, steps + 1, M, D + Dv)
    excess: Tensor  # (B, Hkv, steps + 1, M)
    size: Tensor


def scan(
    state: State, query: Tensor, answered: Tensor | None, scale: float, evicted: Evicted, *, tilted: bool
) -> tuple[States, State]:
    """`s_t = absorb(s_(t-1), evicted_t)` under the moments of all queries up to block t, for every step t.

    Args:
        state: s_0, of which the summary and the moments of queries count.
        query: (B, Hq, steps S, D), S for every step.
        answered: (B, steps S): queries that count; None: all do.
        scale: on the queries.
        evicted: the keys that each step absorbs.
        tilted: as `Summary.absorb`.

    Returns the stand-ins before and after every step, and the state at the end. Sequential in the steps, parallel over
    heads. Cost O((M + E)^2 (D + Dv)) per step and head.
    """
    summary, queries = state.summary, state.queries
    size = query.shape[2] // max(1, evicted.steps)
    scaled = working(query.detach()).unflatten(1, (evicted.key.shape[1], -1)) * scale
    summaries = [summary]
    for step in range(evicted.steps):
        part = slice(step * size, (step + 1) * size)
        queries = queries.add(scaled[:, :, :, part], None if answered is None else answered[:, part])
        key, value, real = evicted.at(step)
        if key.shape[2]:
            summary = summary.absorb(key, value, real, queries.moments(), tilted=tilted)
        summaries.append(summary)
    parts = zip(*((one.rows, one.excess, one.size) for one in summaries), strict=True)
    states = States(*(torch.stack(part, 2) for part in parts))
    return states, replace(state, summary=summary, queries=queries)
