"""What the newest queries of a stream see: near tokens, sinks, heavy keys and stand-ins, each key once."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from fewkeys.core.precision import working
from fewkeys.core.weights import Softmax, Weights, positive
from fewkeys.past.state import State
from fewkeys.past.tokens import Tokens
from fewkeys.select.causal import CAUSAL_BLOCK
from fewkeys.streaming.heavy import HeavyKeys
from fewkeys.streaming.parts import Parts


def attend(state: State, heavy: Sequence[HeavyKeys], parts: Parts, weights: Weights, query: Tensor) -> Tensor:
    """Outputs (B, Hq, M, Dv), in working precision, of the last M tokens' scaled queries (B, Hkv, gqa_ratio, M, D).

    The tokens are of one unit. Cost O(M slots (D + Dv)).
    """
    near, summary = state.near, state.summary
    places = torch.arange(state.length - query.shape[3], state.length, device=query.device)
    seen = _seen(state, heavy, parts, places)
    scores, values = [_scores(query, near, seen)], [near.value]
    held = [rows for rows in (state.sinks, *(one.rows for one in heavy)) if rows.count]
    for number, part in enumerate(held):
        for other in held[:number]:
            part = part.but(other)
        shown = part.real.unsqueeze(2) & (part.place.unsqueeze(2) <= places[:, None])
        scores.append(_scores(query, part, shown & ~_among_near(state, part, seen)))
        values.append(part.value)
    tilted = isinstance(weights, Softmax)
    if summary.count:
        bias = summary.excess if tilted else summary.size.log().clamp_max(0.0)
        scores.append(query @ summary.key.mT.unsqueeze(2) + bias[:, :, None, None])
        values.append(summary.value)
    found = weights.kernel(scores)
    if summary.count and not tilted:
        found[-1] = found[-1] * summary.size[:, :, None, None]
    mixed = torch.cat(found, -1) @ working(torch.cat([working(value) for value in values], 2)).unsqueeze(2)
    return (mixed / positive(torch.cat(found, -1).sum(-1, keepdim=True))).flatten(1, 2)


def _seen(state: State, heavy: Sequence[HeavyKeys], parts: Parts, places: Tensor) -> Tensor:
    """(B, Hkv, M, near): which near keys the queries at `places` (M,) see as near ones."""
    near, mine, place = state.near, places[:, None], state.near.place.unsqueeze(2)
    seen = (place >= parts.near_from(int(places[0]))) | (place > mine - parts.window)
    block = state.length - 1 - (state.length - 1) % CAUSAL_BLOCK
    for one in heavy:
        # Free places of a list go to the block's own keys.
        free = one.count - one.rows.count
        if free > 0:
            own = near.real & (near.place >= block)
            seen = seen | (own & (own.cumsum(-1) <= free)).unsqueeze(2)
    return seen & (place <= mine) & near.real.unsqueeze(2)


def _among_near(state: State, part: Tokens, seen: Tensor) -> Tensor:
    """(B, Hkv, M, K): which of the tokens a query sees among the near ones already."""
    index = part.place - state.first
    inside = ((index >= 0) & (index < state.near.count)).unsqueeze(2)
    index = index.clamp(0, state.near.count - 1).unsqueeze(2).expand(-1, -1, seen.shape[2], -1)
    return inside & seen.gather(-1, index)


def _scores(query: Tensor, keys: Tokens, seen: Tensor) -> Tensor:
    return (query @ working(keys.key).mT.unsqueeze(2)).masked_fill(~seen.unsqueeze(2), -math.inf)
