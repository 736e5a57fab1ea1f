"""Lists and stand-ins of cohorts of queries over token shards.

    cohorts          of the queries of all ranks, which stay where they are (`fewkeys.sketch.halves_apart`)
    kept keys        of every cohort, chosen in two rounds, gathered
    stand-ins        sums over ranks (`fewkeys.core.totals`)

Each rank then attends to its own queries, cohort by cohort.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fewkeys.core.graph import Columns, Graph
from fewkeys.core.inputs import Inputs
from fewkeys.core.precision import working
from fewkeys.core.rows import take
from fewkeys.distributed.communicator import Communicator
from fewkeys.distributed.gather import gather
from fewkeys.distributed.means import nothing
from fewkeys.distributed.selection import Kept, best
from fewkeys.execute import by_cohort, dispatch
from fewkeys.execute.problem import Problem
from fewkeys.plan import Plan
from fewkeys.rest import StandIns
from fewkeys.select import Outliers
from fewkeys.sketch.cohorts import cohorts


def lists(plan: Plan) -> Outliers | None:
    """The rule of a plan whose lists are those of cohorts; None of others."""
    return plan.keep if isinstance(plan.keep, Outliers) and plan.keep.cohorts > 1 else None


def attend(own: Inputs, plan: Plan, keep: Outliers, comm: Communicator) -> Tensor:
    """The output (B, Hq, Nq, Dv) of this rank's queries; `own` knows of the whole sequence, `keep` is that of `lists`.

    H cohorts and lists of S keys cost (R - 1) B Hkv H S (D + Dv) numbers sent by a rank of R; nothing grows with the
    number of tokens.
    """
    with torch.no_grad():
        known = cohorts(own, keep.cohorts)
        score = known.mean @ working(own.key.detach()).mT + keep.common(own, known).unsqueeze(2)
        kept = best(score.flatten(1, 2), keep.count, comm)
    index = kept.index.unflatten(1, score.shape[1:3])
    used = torch.arange(index.shape[-1], device=index.device) < kept.counts[comm.rank].unsqueeze(-1)
    columns = Columns(index, used.view(index.shape), known.place.shape[3], known.place)
    problem = Problem(own, Graph(own, columns=columns), None, plan.weights)
    stand_ins = plan.rest.prepare(own, problem.graph, plan.weights)
    if stand_ins is not None and not isinstance(stand_ins, StandIns):
        raise ValueError(f"rest: expected Drop() or ClusterMeans, got {plan.rest}")
    rows = take(torch.cat([working(own.key), working(own.value)], -1), index).flatten(1, 2)
    heavy = gather(rows, kept.counts, comm)
    # All ranks have said what they had to say.
    if not own.queries:
        return nothing(own, [heavy], stand_ins)
    query = take(working(own.grouped_query()).flatten(2, 3), known.place.clamp_min(0)).flatten(1, 2)
    key, value = heavy.split([own.head_dim, own.value_dim], -1)
    local = Inputs(query, key, value, own.scale)
    plain = Problem(local, Graph(local, columns=_listed(kept, query.shape[2])), stand_ins, plan.weights)
    return by_cohort.restored(problem, dispatch.attend(plain)).to(own.query.dtype)


def _listed(kept: Kept, queries: int) -> Columns:
    """The kept keys of all ranks, in order, as `gather` stacks them."""
    width = max(1, int(kept.counts.max()))
    used = torch.arange(width, device=kept.counts.device) < kept.counts.unsqueeze(-1)
    used = used.permute(1, 2, 0, 3).flatten(2)
    order = used.to(torch.int8).argsort(dim=-1, descending=True, stable=True)[..., : int(used.sum(-1).max())]
    return Columns.shared(order, used.gather(-1, order), queries)
