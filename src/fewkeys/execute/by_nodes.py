"""The reference of plans whose queries descend a tree: all nodes are further columns, and most are hidden.

Means and variances of the nodes are taken here from their keys, by definition; only the choice, which trees there are
and what each query opens, is that of `fewkeys.tree`.
"""

from __future__ import annotations

import math
from typing import cast

import torch
from torch import Tensor

from fewkeys.core.derivatives import constants
from fewkeys.core.inputs import Inputs
from fewkeys.core.precision import working
from fewkeys.core.weights import positive
from fewkeys.execute.problem import Problem
from fewkeys.tree.descent import CURVE, HIGHEST, Descent, Walk, findings
from fewkeys.tree.enough import Enough
from fewkeys.tree.forest import take


def attend(problem: Problem, start: int, stop: int, scores: Tensor) -> Tensor:
    """The output (B, Hq, stop - start, Dv), given the scores (B, Hq, stop - start, Nk) of kept keys, -inf elsewhere."""
    x, value = problem.inputs, working(problem.inputs.value).repeat_interleave(problem.inputs.gqa_ratio, 1)
    descent = cast("Descent", problem.graph.descent)
    parts, places = [], []
    for walk in descent.walks:
        batch = torch.arange(x.batch, device=x.key.device) if walk.sequences.batch is None else walk.sequences.batch
        logit, mean = (
            part.unflatten(0, (-1, x.kv_heads)).flatten(1, 2) for part in _columns(x, walk, descent.enough, start, stop)
        )
        # One part: there may be no node at all.
        (weight,) = problem.weights.kernel([torch.cat([scores[batch], logit], -1)])
        total, near, far = weight.sum(-1, keepdim=True), weight[..., : x.keys], weight[..., x.keys :]
        parts.append((near @ value[batch] + far @ mean) / positive(total))
        places.append(batch)
    return torch.cat(parts)[torch.cat(places).argsort()]


def _columns(x: Inputs, walk: Walk, enough: Enough | None, start: int, stop: int) -> tuple[Tensor, Tensor]:
    """Logits (H, gqa_ratio, stop - start, C) of all nodes, -inf where they do not stand in, and their mean values
    (H, gqa_ratio, C, Dv).
    """
    own = walk.sequences
    query, key, value = own.queries(x), own.rows(x.key), own.rows(x.value)
    shown = _shown(x, walk, enough, start, stop)
    logits, means = [query.new_zeros((*query.shape[:2], stop - start, 0))], [value[:, None, :0]]
    for size in walk.nodes:
        count = walk.nodes[size].key.shape[1]
        members = walk.forest.order[:, : count * size].unflatten(1, (count, size))
        inside = take(key, members)
        mean, variance = inside.mean(2), inside.var(2, correction=0)
        asked = query[:, :, start:stop]
        spread = asked.square() @ variance.mT.unsqueeze(1)
        logit = asked @ mean.mT.unsqueeze(1) + math.log(size) + (CURVE * spread).clamp_max(HIGHEST)
        logits.append(logit.masked_fill(~shown[size], -torch.inf))
        means.append(take(value, members).mean(2).unsqueeze(1))
    return torch.cat(logits, -1), torch.cat(means, 2).expand(-1, query.shape[1], -1, -1)


@constants()
def _shown(x: Inputs, walk: Walk, enough: Enough | None, start: int, stop: int) -> dict[int, Tensor]:
    """By the size of nodes, which of them stand in for each of these queries: bool (H, gqa_ratio, stop - start, C)."""
    query = walk.sequences.queries(x)
    shape = query.shape[:3]
    found = {
        size: torch.zeros((*shape, table.key.shape[1]), dtype=torch.bool, device=query.device)
        for size, table in walk.nodes.items()
    }
    for part in findings(x, walk, enough, start, stop):
        for closed in part.closed:
            rows, stands = (one.unflatten(1, (shape[1], -1)) for one in (closed.rows, closed.logit > -torch.inf))
            hits = torch.zeros_like(found[closed.size][part.heads, :, part.span], dtype=torch.int32)
            hits.scatter_add_(3, rows, stands.to(torch.int32))
            found[closed.size][part.heads, :, part.span] |= hits > 0
    return {size: shown[:, :, start:stop] for size, shown in found.items()}
