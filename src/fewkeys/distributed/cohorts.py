"""Lists and stand-ins of cohorts of queries, beside a window, over token shards.

    cohorts     of the queries of all ranks; no query is moved (`fewkeys.sketch.halves`)
    kept keys   of each cohort, chosen in two rounds, then gathered
    stand-ins   sums over ranks (`fewkeys.core.totals`)
    window      the nearest keys of the neighbouring shards, with their clusters, gathered

Each rank then attends to its own, the neighbouring and all kept keys.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from fewkeys.core.graph import Graph
from fewkeys.core.inputs import Inputs
from fewkeys.core.precision import working
from fewkeys.core.rows import marked_places
from fewkeys.distributed.communicator import Communicator
from fewkeys.distributed.selection import KeptKeys, best
from fewkeys.distributed.totals import gather, no_output
from fewkeys.execute import dispatch
from fewkeys.execute.problem import Problem
from fewkeys.plan import Plan
from fewkeys.rest import ClusterMeans, Drop
from fewkeys.select import Outliers, Window
from fewkeys.sketch.cohorts import cohorts


def lists(plan: Plan) -> Outliers | None:
    """The plan's `Outliers`, alone or beside windows; else None."""
    rules = [part for part in plan.parts if not isinstance(part, Window)]
    if len(rules) != 1 or not isinstance(rules[0], Outliers):
        return None
    if not isinstance(plan.rest, ClusterMeans | Drop):
        raise ValueError(f"rest: expected Drop() or ClusterMeans, got {plan.rest}")
    return rules[0]


def attend(inputs: Inputs, plan: Plan, keep: Outliers, tokens: Sequence[int], comm: Communicator) -> Tensor:
    """The output (B, Hq, Nq, Dv) of this rank's queries. `tokens`: the number of keys on each rank.

    Each of R ranks sends (R - 1) B Hkv H S (D + Dv) numbers for H cohorts with lists of S keys, and
    (R - 1) B Hkv W (D + Dv + 1) for a window of W keys.
    """
    x, reach = inputs, band(plan)
    with torch.no_grad():
        cohort = cohorts(x, keep.cohorts)
        score = cohort.mean @ working(x.key.detach()).mT + keep.common(x, cohort).unsqueeze(2)
        kept = best(score.flatten(1, 2), keep.count, comm)
    heads = score.shape[1:3]
    index = kept.index.unflatten(1, heads)
    used = torch.arange(index.shape[-1], device=index.device) < kept.counts[comm.rank].unsqueeze(-1)
    local_lists = cohort.lists(index, used.view(index.shape))
    stand_ins = None
    if isinstance(plan.rest, ClusterMeans):
        stand_ins = plan.rest.prepare(x, Graph(x, reach, local_lists), plan.weights)
    left, right = reach or (0, 0)
    rows = labelled = torch.cat([working(x.key), working(x.value)], -1)
    heavy = kept.gathered(rows, comm)
    if stand_ins is not None:
        # Labels are small: every floating dtype holds them exactly.
        labelled = torch.cat([rows, stand_ins.label.to(rows.dtype).unsqueeze(-1)], -1)
    before, after = _edges(labelled, tokens, left, right, comm)
    near = torch.cat([before, labelled, after], 2)
    # Kept keys that this rank does not hold come last, cohort by cohort, after rows that no window reaches.
    first = x.whole.first_key - before.shape[2]
    base = near.shape[2] + right + torch.arange(heads[1], device=index.device).repeat(heads[0]) * heavy.shape[2]
    index, used = _columns(kept, tokens, range(first, first + near.shape[2]), base.unsqueeze(-1), comm)
    if stand_ins is not None:
        near, label = near[..., :-1], near[..., -1].long()
        stand_ins = replace(stand_ins, label=pad(label, (0, right + heads[1] * heavy.shape[2])))
    # No collectives below this line.
    if not x.queries:
        s = stand_ins
        return no_output(x, [before, after, heavy, *(() if s is None else (s.key, s.value, s.left, s.right))])
    far = heavy.unflatten(1, heads).flatten(2, 3)
    key, value = torch.cat([pad(near, (0, 0, 0, right)), far], 2).split([x.head_dim, x.value_dim], -1)
    position = torch.arange(key.shape[2], device=key.device)
    real = ((position < near.shape[2]) | (position >= near.shape[2] + right)).expand(x.batch, -1)
    local = Inputs(working(x.query), key, value, x.scale, offset=before.shape[2], valid=real)
    columns = cohort.lists(index.unflatten(1, heads), used.unflatten(1, heads))
    return dispatch.attend(Problem(local, Graph(local, reach, columns), stand_ins, plan.weights)).to(x.query.dtype)


def band(plan: Plan) -> tuple[int, int] | None:
    """How far the windows of a plan reach before and after a query."""
    reach = max((part.size for part in plan.parts if isinstance(part, Window)), default=0)
    return (reach // 2, (reach - 1) // 2) if reach else None


def _edges(rows: Tensor, tokens: Sequence[int], left: int, right: int, comm: Communicator) -> tuple[Tensor, Tensor]:
    """The `left` rows (B, H, ., F) before this rank's first and the `right` rows after its last, or fewer."""
    none = rows[:, :, :0]
    if not left:
        return none, none
    firsts, lasts = ([min(count, n) for n in tokens] for count in (right, left))
    ends = torch.cat([rows[:, :, : firsts[comm.rank]], rows[:, :, rows.shape[2] - lasts[comm.rank] :]], 2)
    gathered = gather(ends, max(map(sum, zip(firsts, lasts, strict=True))), comm)
    before = torch.cat([none, *(gathered[r, :, :, firsts[r] : firsts[r] + lasts[r]] for r in range(comm.rank))], 2)
    after = torch.cat([none, *(gathered[r, :, :, : firsts[r]] for r in range(comm.rank + 1, comm.size))], 2)
    # Other ranks wait for this rank's backward pass, also where it uses no gathered row.
    unused = gathered[..., :0].sum()
    return before[:, :, max(0, before.shape[2] - left) :] + unused, after[:, :, :right] + unused


def _columns(
    kept: KeptKeys, tokens: Sequence[int], near: range, base: Tensor, comm: Communicator
) -> tuple[Tensor, Tensor]:
    """The row, on this rank, of every kept key, and which entries are used.

    A key in `near` has its own row. The others follow from `base` (H, 1) on, rank by rank, each with `kept.width` rows.
    """
    places = torch.stack(comm.all_gather(pad(kept.index, (0, kept.width - kept.index.shape[-1]))))
    firsts = torch.tensor([sum(tokens[:rank]) for rank in range(comm.size)], device=places.device).view(-1, 1, 1, 1)
    position, used = (places + firsts).movedim(0, 2).flatten(2), kept.used
    is_near = (position >= near.start) & (position < near.stop)
    index = torch.where(is_near, position - near.start, base + torch.arange(position.shape[-1], device=position.device))
    order = marked_places(used)
    return index.gather(-1, order), used.gather(-1, order)
