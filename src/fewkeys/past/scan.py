"""The scan: the summaries of a whole sequence, one block after the other."""

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
    """The stand-ins before the first step and after each: the tensors of `Summary` with one more dimension."""

    rows: Tensor  # (B, Hkv, steps + 1, M, D + Dv)
    excess: Tensor  # (B, Hkv, steps + 1, M)
    size: Tensor


def scan(
    state: State, query: Tensor, has_query: Tensor | None, scale: float, evicted: Evicted, *, tilted: bool
) -> tuple[States, State]:
    """`s_t = absorb(s_(t-1), evicted_t)` under the moments of all queries up to block t, for every step t.

    Args:
        state: s_0; its summary and its moments of queries are read.
        query: (B, Hq, steps S, D), S for each step.
        has_query: bool (B, steps S), False for padding; None: all are real.
        scale: the factor on the queries.
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
        queries = queries.add(scaled[:, :, :, part], None if has_query is None else has_query[:, part])
        key, value, real = evicted.at(step)
        if key.shape[2]:
            summary = summary.absorb(key, value, real, queries.moments(), tilted=tilted)
        summaries.append(summary)
    parts = zip(*((one.rows, one.excess, one.size) for one in summaries), strict=True)
    states = States(*(torch.stack(part, 2) for part in parts))
    return states, replace(state, summary=summary, queries=queries)
