"""Lists and stand-ins of cohorts of queries, beside a window, over token shards.

    cohorts     of the queries of all ranks; no query is moved (`fewkeys.sketch.halves`)
    kept keys   of each cohort, chosen by their scores, and the edges of shards that windows reach, sent to all ranks
    stand-ins   sums over ranks (`fewkeys.core.totals`)

Each rank then attends to its own, the neighbouring and all kept keys.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate

import torch
from torch import Tensor

from fewkeys.core.graph import Graph
from fewkeys.core.inputs import Inputs
from fewkeys.core.precision import working
from fewkeys.core.rows import marked_places
from fewkeys.distributed.selection import best, rows_at
from fewkeys.execute import dispatch
from fewkeys.execute.problem import Problem
from fewkeys.plan import Plan
from fewkeys.rest import ClusterMeans
from fewkeys.select import Outliers, Window
from fewkeys.sketch.cohorts import cohorts


def attend(inputs: Inputs, plan: Plan, keep: Outliers, tokens: Sequence[int], rank: int) -> Tensor:
    """The output (B, Hq, Nq, Dv) of this rank's queries. `tokens`: the number of keys on each rank.

    Each of R ranks sends about 2 B Hkv (H S + R W) (D + Dv + 1) numbers for H cohorts with lists of S keys and a window
    of W keys.
    """
    x, first, reach = inputs, inputs.whole.first_key, band(plan)
    left, right = (min(side, x.whole.keys) for side in reach or (0, 0))
    reach = (left, right) if reach else None
    with torch.no_grad():
        cohort = cohorts(x, keep.cohorts)
        score = cohort.mean @ working(x.key.detach()).mT + keep.common(x, cohort).unsqueeze(2)
        position = best(x, score.flatten(1, 2), keep.count)[0].unflatten(1, score.shape[1:3])
    rows, stand_ins = torch.cat([working(x.key), working(x.value)], -1), None
    if isinstance(plan.rest, ClusterMeans):
        is_here = (position >= first) & (position < first + x.keys)
        order = marked_places(is_here)
        here = (position - first).gather(-1, order).clamp(0, x.keys - 1)
        graph = Graph(x, reach, cohort.lists(here, is_here.gather(-1, order)))
        stand_ins = plan.rest.prepare(x, graph, plan.weights)
        # Labels are small: every float holds them exactly.
        rows = torch.cat([rows, stand_ins.label.to(rows.dtype).unsqueeze(-1)], -1)
    start = torch.tensor([0, *accumulate(tokens)], device=rows.device).unsqueeze(1)
    before, after = (torch.arange(*ends, device=rows.device) for ends in ((-left, 0), (0, right)))
    edge = torch.cat([start[:-1] + before, start[1:] + after], 1)
    wanted = torch.cat([position.flatten(2), edge.flatten().expand(*rows.shape[:2], -1)], 2)
    kept, edges = rows_at(x, rows, wanted).split([wanted.shape[2] - edge.numel(), edge.numel()], 2)
    before, after = edges.unflatten(2, edge.shape)[:, :, rank].split([left, right], 2)
    # Kept keys that are not near come last, cohort by cohort, after rows that windows reach.
    near = torch.cat([before, rows, after], 2)
    rows = torch.cat([near, kept], 2)
    if not x.queries:
        s = stand_ins
        return no_output(x, rows, *(() if s is None else (s.key, s.value, s.left, s.right)))
    at = position - first + left
    far = near.shape[2] + torch.arange(kept.shape[2], device=rows.device).view(position.shape[2:])
    columns = cohort.lists(at.where((at >= 0) & (at < near.shape[2]), far), torch.ones_like(at, dtype=torch.bool))
    if stand_ins is not None:
        stand_ins = replace(stand_ins, label=rows[..., -1].long())
    key, value = rows[..., : x.head_dim + x.value_dim].split([x.head_dim, x.value_dim], -1)
    place = torch.arange(rows.shape[2], device=rows.device)
    is_real = ((place + first >= left) & (place + first < x.whole.keys + left)) | (place >= near.shape[2])
    local = Inputs(working(x.query), key, value, x.scale, offset=left, valid=is_real.expand(x.batch, -1))
    return dispatch.attend(Problem(local, Graph(local, reach, columns), stand_ins, plan.weights)).to(x.query.dtype)


def band(plan: Plan) -> tuple[int, int] | None:
    """How far the windows of a plan reach before and after a query."""
    reach = max((part.size for part in plan.parts if isinstance(part, Window)), default=0)
    return (reach // 2, (reach - 1) // 2) if reach else None


def no_output(inputs: Inputs, *parts: Tensor | None) -> Tensor:
    """The empty output of a rank without queries. It depends on the parts, whose backward pass other ranks wait for."""
    tie = sum((part.sum() for part in parts if part is not None), working(inputs.key).new_zeros(()))
    return inputs.query[..., :1].expand(-1, -1, -1, inputs.value_dim) * tie.to(inputs.query.dtype)
