"""Attention of the newest queries of a stream to near tokens, sinks and stand-ins, each key once."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fewkeys.core.precision import working
from fewkeys.core.weights import Softmax, Weights, positive
from fewkeys.memory.parts import Parts
from fewkeys.past.state import State
from fewkeys.past.tokens import Tokens


def attend(state: State, parts: Parts, weights: Weights, query: Tensor) -> Tensor:
    """Outputs (B, Hq, M, Dv), in working precision, of the last M tokens' scaled queries (B, Hkv, gqa_ratio, M, D).

    The tokens are of one unit. Cost O(M slots (D + Dv)).
    """
    near, summary, rows = state.near, state.summary, query.flatten(2, 3)
    shape, tilted = query.shape[2:4], isinstance(weights, Softmax)

    def scores(key: Tensor) -> Tensor:
        by_query: Tensor = (rows @ working(key).mT).unflatten(2, shape)
        return by_query

    places = torch.arange(state.length - shape[1], state.length, device=query.device)
    seen = _seen(state, parts, places)
    parts_of_row = [(scores(near.key).masked_fill_(~seen, -math.inf), near.value)]
    part = state.sinks.tokens()
    if part.count:
        shown = part.real.unsqueeze(2) & (part.place.unsqueeze(2) <= places[:, None])
        hidden = ~shown | _among_near(state, part, seen)
        parts_of_row.append((scores(part.key).masked_fill_(hidden.unsqueeze(2), -math.inf), part.value))
    if summary.count:
        bias = summary.excess if tilted else summary.size.log().clamp_max(0.0)
        parts_of_row.append((scores(summary.key) + bias[:, :, None, None], summary.value))
    weight = weights.kernel([score for score, _ in parts_of_row])
    if summary.count and not tilted:
        weight[-1] = weight[-1] * summary.size[:, :, None, None]
    mixed, total = torch.zeros_like(rows[..., :1]), torch.zeros_like(rows[..., :1])
    for (_, value), of_part in zip(parts_of_row, weight, strict=True):
        flat = of_part.flatten(2, 3)
        mixed, total = mixed + flat @ working(value), total + flat.sum(-1, keepdim=True)
    output: Tensor = (mixed / positive(total)).unflatten(2, shape).flatten(1, 2)
    return output


def _seen(state: State, parts: Parts, places: Tensor) -> Tensor:
    """(M, near): the near keys that the queries at `places` (M,) see."""
    near, last = state.near, state.length - 1
    place, query = torch.arange(near.first, near.stop, device=places.device), places[:, None]
    seen = place > query - parts.window
    if parts.recent is not None:
        seen |= place >= parts.near_from(last - len(places) + 1)
    return seen & (place <= query)


def _among_near(state: State, part: Tokens, seen: Tensor) -> Tensor:
    """(B, Hkv, M, K): which of the tokens are near keys that a query sees, so that they do not count again."""
    index = part.place - state.near.first
    inside = (index >= 0) & (index < seen.shape[1])
    index = index.clamp(0, seen.shape[1] - 1).unsqueeze(2).expand(-1, -1, len(seen), -1)
    return inside.unsqueeze(2) & seen.expand(*index.shape[:2], -1, -1).gather(-1, index)
