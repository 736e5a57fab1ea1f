"""Attention of the newest queries of a stream to near tokens, sinks and stand-ins, each key once."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fewkeys.core.precision import working
from fewkeys.core.weights import Softmax, Weights, positive
from fewkeys.memory.parts import Parts
from fewkeys.past.state import State


def attend(state: State, parts: Parts, weights: Weights, query: Tensor) -> Tensor:
    """Outputs (B, Hq, M, Dv), in working precision, of the last M tokens' scaled queries (B, Hkv, gqa_ratio, M, D).

    The tokens are of one unit. Cost O(M slots (D + Dv)).
    """
    near, sinks, summary, rows = state.near, state.sinks, state.summary, query.flatten(2, 3)
    shape, tilted = query.shape[2:4], isinstance(weights, Softmax)

    def scores(key: Tensor) -> Tensor:
        by_query: Tensor = (rows @ working(key).mT).unflatten(2, shape)
        return by_query

    places = torch.arange(state.length - shape[1], state.length, device=query.device)[:, None]
    seen = _seen(state, parts, places)
    sources = [(scores(near.key).masked_fill_(~seen, -math.inf), near.value)]
    if sinks.count:
        hidden = torch.arange(sinks.count, device=query.device) > places
        # Sinks that are near tokens, too, count once.
        hidden[:, near.first :] |= seen[:, : max(0, sinks.count - near.first)]
        sources.append((scores(sinks.key).masked_fill_(hidden, -math.inf), sinks.value))
    if summary.count:
        bias = summary.excess if tilted else summary.size.log().clamp_max(0.0)
        sources.append((scores(summary.key) + bias[:, :, None, None], summary.value))
    weight = weights.kernel([score for score, _ in sources])
    if summary.count and not tilted:
        weight[-1] = weight[-1] * summary.size[:, :, None, None]
    mixed, total = torch.zeros_like(rows[..., :1]), torch.zeros_like(rows[..., :1])
    for (_, value), of_source in zip(sources, weight, strict=True):
        flat = of_source.flatten(2, 3)
        mixed, total = mixed + flat @ working(value), total + flat.sum(-1, keepdim=True)
    output: Tensor = (mixed / positive(total)).unflatten(2, shape).flatten(1, 2)
    return output


def _seen(state: State, parts: Parts, places: Tensor) -> Tensor:
    """(M, near): the near tokens that the queries at `places` (M, 1) see."""
    place = torch.arange(state.near.first, state.near.stop, device=places.device)
    seen = place > places - parts.window
    if parts.recent is not None:
        seen |= place >= parts.near_from(state.length - len(places))
    return seen & (place <= places)
