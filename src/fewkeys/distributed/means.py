"""Windows and cluster means over token shards.

    moments, means, clusters    sums over ranks (`fewkeys.core.totals`), and Lloyd's steps on the sample of all ranks
    kept keys                   chosen in two rounds, gathered
    window                      the last and first keys of the neighbouring shards, gathered

Each rank then attends as one process does, to its own keys, the edges beside them and the kept keys of all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from fewkeys.core.graph import Columns, Graph
from fewkeys.core.inputs import Inputs, Shard
from fewkeys.core.precision import working
from fewkeys.distributed.communicator import Communicator
from fewkeys.distributed.gather import gather
from fewkeys.distributed.keys import OverRanks
from fewkeys.distributed.selection import KeptKeys, kept_of, select
from fewkeys.execute import dispatch
from fewkeys.execute.problem import Problem
from fewkeys.plan import Plan
from fewkeys.rest.base import CohortStandIns, StandIns
from fewkeys.select.base import Sharded


def check_parts(plan: Plan) -> tuple[Sharded, ...]:
    """How the parts of a plan choose over ranks without causality; `ValueError` for those that do not."""
    rules = tuple(rule for part in plan.parts if (rule := part.sharded) is not None)
    if not rules or len(rules) < len(plan.parts):
        raise ValueError(
            "keep: expected Window, Outliers, Leverage, KeyNorm, RandomKeys or Sinks, the selectors that work over "
            f"ranks without causality, got {'None (exact attention)' if plan.keep is None else plan.keep}"
        )
    if not plan.rest.sharded:
        raise ValueError(f"rest: expected Drop() or ClusterMeans, which work over ranks, got {plan.rest}")
    return rules


def whole(inputs: Inputs, tokens: list[int], asked: list[int], comm: Communicator, wanted: bool = False) -> Inputs:
    """The problem of this rank, with the statistics of the whole sequence.

    `tokens`, `asked`: all ranks' numbers of keys and queries. `wanted`: some rank wants gradients, so that all ranks
    pass them on.
    """
    shard = Shard(OverRanks(comm), sum(tokens[: comm.rank]), sum(tokens), sum(asked[: comm.rank]), sum(asked))
    key = inputs.key.detach().requires_grad_() if wanted and not inputs.key.requires_grad else inputs.key
    return replace(inputs, key=key, shard=shard, _memory={})


def attend(
    inputs: Inputs,
    plan: Plan,
    rules: Sequence[Sharded],
    tokens: list[int],
    asked: list[int],
    comm: Communicator,
    wanted: bool,
) -> Tensor:
    """The output (B, Hq, Nq, Dv) of this rank's queries; arguments as of `whole`."""
    first = sum(tokens[: comm.rank])
    x = whole(inputs, tokens, asked, comm, wanted)
    with torch.no_grad():
        kept = _kept(x, rules, comm)
    listed = kept.index.shape[-1]
    used = torch.arange(listed, device=x.key.device) < kept.counts[comm.rank].unsqueeze(-1)
    graph = Graph(x, columns=Columns.shared(kept.index, used, max(1, x.queries)))
    stand_ins = plan.rest.prepare(x, graph, plan.weights)
    if stand_ins is not None and not isinstance(stand_ins, StandIns):
        raise ValueError(f"rest: expected Drop() or ClusterMeans, got {plan.rest}")
    reach = max(rule.band for rule in rules)
    left, right = (reach // 2, (reach - 1) // 2) if reach else (0, 0)
    rows = torch.cat([working(x.key), working(x.value)], -1)
    edges = edges_of(rows, tokens, left, right, comm)
    heavy = gather(rows.gather(2, kept.index.unsqueeze(-1).expand(-1, -1, -1, rows.shape[-1])), kept.counts, comm)
    near = torch.cat([edges[0], rows, edges[1]], 2)
    # What is far away stands on rows that no window reaches, one for each stand-in, which thus keeps its total.
    far = right + (0 if stand_ins is None else stand_ins.count)
    start, base = first - edges[0].shape[2], near.shape[2] + far
    index, used = columns_of(kept, tokens, range(start, start + near.shape[2]), base, comm)
    if stand_ins is not None:
        label, share = _shares(stand_ins, tokens, left, right, comm)
        stand_ins = replace(stand_ins, label=pad(label, (0, heavy.shape[2])), share=pad(share, (0, heavy.shape[2])))
    # No collectives below this line.
    if not x.queries:
        return nothing(x, [*edges, heavy], stand_ins)
    key, value = torch.cat([pad(near, (0, 0, 0, far)), heavy], 2).split([x.head_dim, x.value_dim], -1)
    place = torch.arange(key.shape[2], device=key.device)
    real = ((place < near.shape[2]) | (place >= base)).expand(x.batch, -1)
    local = Inputs(working(x.query), key, value, x.scale, offset=edges[0].shape[2], valid=real)
    columns = Columns.shared(index, used, x.queries) if index.shape[-1] else None
    joined = Graph(local, (left, right) if reach else None, columns)
    return dispatch.attend(Problem(local, joined, stand_ins, plan.weights)).to(inputs.query.dtype)


@torch.no_grad()
def _shares(stand_ins: StandIns, tokens: list[int], left: int, right: int, comm: Communicator) -> tuple[Tensor, Tensor]:
    """Labels and shares (B, H, .) of this rank's and the neighbouring keys; `right` free rows; and what is missing."""
    share = stand_ins.share
    # Labels are small: every floating dtype holds them exactly.
    local = torch.stack([stand_ins.label.to(share.dtype), share], -1)
    before, after = edges_of(local, tokens, left, right, comm)
    label, share = torch.cat([before, local, after], 2).unbind(-1)
    label = label.long()
    near = share.new_zeros(stand_ins.total.shape).scatter_add_(-1, label, share)
    missing = comm.all_reduce(stand_ins.total) - near
    each = torch.arange(stand_ins.count, device=label.device).expand(*label.shape[:2], -1)
    return torch.cat([pad(label, (0, right)), each], 2), torch.cat([pad(share, (0, right)), missing], 2)


def _kept(inputs: Inputs, rules: Sequence[Sharded], comm: Communicator) -> KeptKeys:
    """The keys that any rule but bands keeps."""
    marked = torch.zeros(inputs.key.shape[:3], dtype=torch.bool, device=inputs.key.device)
    for rule in rules:
        if rule.score is not None:
            marked = marked | _marks(select(rule, inputs, comm), marked, comm)
    return kept_of(marked, comm)


def _marks(kept: KeptKeys, like: Tensor, comm: Communicator) -> Tensor:
    used = torch.arange(kept.index.shape[-1], device=like.device) < kept.counts[comm.rank].unsqueeze(-1)
    hits = torch.zeros(like.shape, dtype=torch.int32, device=like.device)
    return hits.scatter_add_(-1, kept.index, used.to(torch.int32)) > 0


def edges_of(rows: Tensor, tokens: list[int], left: int, right: int, comm: Communicator) -> tuple[Tensor, Tensor]:
    """The rows (B, H, ., F) that stand up to `left` before and `right` after this rank's own."""
    edges = []
    for count, before in ((left, True), (right, False)):
        counts = [min(count, n) for n in tokens]
        sent = counts[comm.rank]
        part = rows[:, :, rows.shape[2] - sent :] if before else rows[:, :, :sent]
        if not count:
            edges.append(part)
            continue
        every = torch.tensor(counts, device=rows.device).view(-1, 1, 1).expand(-1, *rows.shape[:2])
        stacked = gather(part, every, comm).unflatten(2, (comm.size, -1))
        # Where this rank needs none of them, gradients must pass all the same: the others wait.
        unused = stacked[:, :, :, :0].sum() if stacked.requires_grad else 0.0
        ranks = range(comm.rank) if before else range(comm.rank + 1, comm.size)
        beside = torch.cat([rows[:, :, :0], *(stacked[:, :, rank, : counts[rank]] for rank in ranks)], 2)
        edges.append((beside[:, :, max(0, beside.shape[2] - count) :] if before else beside[:, :, :count]) + unused)
    return edges[0], edges[1]


def columns_of(
    kept: KeptKeys, tokens: list[int], near: range, base: int | Tensor, comm: Communicator
) -> tuple[Tensor, Tensor]:
    """Where the kept keys of all ranks stand among this rank's rows: at their own place where it holds the keys `near`,
    else from `base` on, in the order in which `gather` stacks them. `base`: a number, or one for each head (H, 1).
    """
    width = max(1, int(kept.counts.max()))
    places = torch.stack(comm.all_gather(pad(kept.index, (0, width - kept.index.shape[-1]))))
    firsts = torch.tensor([sum(tokens[:rank]) for rank in range(comm.size)], device=places.device).view(-1, 1, 1, 1)
    used = torch.arange(width, device=places.device) < kept.counts.unsqueeze(-1)
    position = (places + firsts).permute(1, 2, 0, 3).flatten(2)
    used = used.permute(1, 2, 0, 3).flatten(2)
    inside = (position >= near.start) & (position < near.stop)
    index = torch.where(inside, position - near.start, base + torch.arange(position.shape[-1], device=position.device))
    order = used.to(torch.int8).argsort(dim=-1, descending=True, stable=True)
    order = order[..., : int(used.sum(-1).max())]
    return index.gather(-1, order), used.gather(-1, order)


def nothing(inputs: Inputs, rows: list[Tensor], stand_ins: StandIns | CohortStandIns | None) -> Tensor:
    """No output, but a part in the graph: the other ranks' backward pass waits for this one's."""
    parts = [*rows]
    if stand_ins is not None:
        parts += [stand_ins.key, stand_ins.value]
        parts += [part for part in (stand_ins.left, stand_ins.right) if part is not None]
    tie = sum((part.sum() for part in parts), working(inputs.key).new_zeros(()))
    return inputs.query[..., :1].expand(-1, -1, -1, inputs.value_dim) * tie.to(inputs.query.dtype)
