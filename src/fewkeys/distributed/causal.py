"""Causal attention over token shards: each rank takes over the past of the ranks before it, and hands it on.

    past of all earlier ranks -> blocks of this shard, one after the other -> past for the next rank
                                 |
                                 all queries of this shard at once, beside what the next rank does

The past is a `Carry`: the latest keys, the sinks and a summary, whatever the length. Making it is sequential, as it is
in one process, and a small part of the work; attending is parallel over ranks.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from fewkeys.core.graph import Graph
from fewkeys.core.inputs import Inputs
from fewkeys.core.precision import working
from fewkeys.core.weights import Softmax
from fewkeys.distributed.carry import Carry, hand_on, take_over
from fewkeys.distributed.communicator import Communicator
from fewkeys.execute import dispatch
from fewkeys.execute.problem import Problem
from fewkeys.past.scan import ByStep, Leaving, Past, Walk
from fewkeys.plan import Plan
from fewkeys.rest import BlockStandIns
from fewkeys.select import RecentBlocks
from fewkeys.streaming.parts import Parts, parts_of


def check_causal(plan: Plan) -> Parts:
    """The parts of a causal plan that works over ranks; `ValueError` for others."""
    parts = parts_of(plan)
    if parts.recent is None or parts.heavy or parts.window:
        raise ValueError(
            f"keep: expected RecentBlocks, and Sinks beside it, the causal rules that work over ranks so far, got "
            f"{plan.keep}; fewkeys.budget(slots, is_causal=True) is such a plan"
        )
    return parts


def attend(inputs: Inputs, plan: Plan, parts: Parts, first: int, comm: Communicator, wanted: bool) -> Tensor:
    """The output (B, Hq, Nq, Dv) of this rank's tokens, the first of which stands at position `first` of the sequence.

    As many queries as keys; there may be none. `wanted`: some rank wants gradients, so that all ranks pass them on.
    """
    recent = _recent(parts)
    key, value = working(inputs.key), working(inputs.value)
    near = recent.size * recent.blocks
    past = Carry.empty(key, value, inputs.groups, near=near, sinks=parts.sinks, block=recent.size, means=parts.means)
    past = replace(past, near_key=past.near_key.requires_grad_(wanted))
    if comm.rank:
        # Whichever of this rank's tensors a gradient is asked for, the earlier ranks' gradients pass as well.
        tie = key.new_zeros((), requires_grad=wanted)
        tie = sum((t[:, :, :0].sum().to(tie.dtype) for t in (inputs.query, inputs.key, inputs.value)), tie)
        past = take_over(past, first, comm, tie)
    summaries, carry = _walk(inputs, plan, parts, past)
    token = hand_on(carry, comm) if comm.rank + 1 < comm.size else key.new_zeros(())
    output = _output(inputs, plan, parts, past, summaries)
    # The zero ties the next rank's gradients to this rank's backward pass.
    return output + token.to(output.dtype)


def _recent(parts: Parts) -> RecentBlocks:
    if parts.recent is None:
        raise ValueError("keep: expected RecentBlocks")
    return parts.recent


def _walk(inputs: Inputs, plan: Plan, parts: Parts, past: Carry) -> tuple[ByStep, Carry]:
    """The summary that each block of this shard's queries sees, the first block's first; and the past after it."""
    size, first, last = _recent(parts).size, past.place, past.place + inputs.keys
    key = torch.cat([past.near_key, working(inputs.key)], 2)
    value = torch.cat([past.near_value, working(inputs.value)], 2)
    start = first - past.near_key.shape[2]  # position of the first of these rows
    begun = first % size
    query = working(inputs.grouped_query().detach()) * inputs.scale
    asked = torch.cat([past.asked[:, :, :, :begun], query], 3)
    blocks = range(first // size + 1, last // size + 1)
    lower = [max(parts.near_from((block - 1) * size), parts.sinks) for block in blocks]
    upper = [parts.near_from(block * size) if parts.means else 0 for block in blocks]
    index = torch.tensor(lower, device=key.device).view(-1, 1) - start + torch.arange(size, device=key.device)
    real = index + start < torch.tensor(upper, device=key.device).view(-1, 1)
    index, real = (part.expand(*key.shape[:2], -1, -1) for part in (index.clamp(0, key.shape[2] - 1), real))
    complete = len(blocks) * size
    summaries, moved = Walk(
        Past(past.summary, past.queries),
        asked[:, :, :, :complete].flatten(1, 2),
        None,
        1.0,
        Leaving(key, value, index, real),
        isinstance(plan.weights, Softmax),
    ).run()
    asked = asked[:, :, :, complete:]
    near, free = past.near_key.shape[2], max(0, parts.sinks - first)
    carry = Carry(
        last,
        key[:, :, key.shape[2] - near :],
        value[:, :, value.shape[2] - near :],
        _sunk(past.sink_key, inputs.key, first, free),
        _sunk(past.sink_value, inputs.value, first, free),
        pad(asked, (0, 0, 0, size - asked.shape[3])),
        moved.summary,
        moved.queries,
    )
    return summaries, carry


def _sunk(old: Tensor, new: Tensor, first: int, free: int) -> Tensor:
    """The sinks with this shard's tokens in the places that were still free."""
    if not free or not new.shape[2]:
        return old
    fresh = working(new)[:, :, :free]
    return torch.cat([old[:, :, :first], fresh, old[:, :, first + fresh.shape[2] :]], 2)


def _output(inputs: Inputs, plan: Plan, parts: Parts, past: Carry, summaries: ByStep) -> Tensor:
    size, first, count = _recent(parts).size, past.place, inputs.queries
    if not count:
        # No output, but a part in the graph: the ranks before wait for the gradients.
        whole = sum(
            (t.sum() for t in (past.near_key, past.near_value, past.sink_key, past.sink_value)), torch.zeros(())
        )
        return inputs.query[..., :1].expand(-1, -1, -1, inputs.value_dim) * (whole + past.summary.key.sum() * 0)
    origin = parts.near_from(first)
    halo = first - origin
    rows = past.near_key.shape[2]
    key = torch.cat([past.near_key[:, :, rows - halo :], working(inputs.key)], 2)
    value = torch.cat([past.near_value[:, :, rows - halo :], working(inputs.value)], 2)
    # Positions are counted from the first key in reach, which begins a block.
    local = Inputs(working(inputs.query), key, value, inputs.scale, True, halo)
    graph = _recent(parts).select(local)
    if graph.columns is None:
        raise ValueError("keep: expected RecentBlocks")
    blocks = range(first // size, (first + count - 1) // size + 1)
    means = ByStep(*(part[:, :, : len(blocks)] for part in (summaries.rows, summaries.excess, summaries.size)))
    stand_ins = BlockStandIns(_beside_sinks(means, past, parts, blocks, local), inputs.head_dim)
    output = dispatch.attend(Problem(local, Graph(local, columns=graph.columns), stand_ins, plan.weights))
    return output.to(inputs.query.dtype)


def _beside_sinks(means: ByStep, past: Carry, parts: Parts, blocks: range, local: Inputs) -> ByStep:
    """The stand-ins of every block, and the sinks that its recent blocks do not reach: each stands in for itself."""
    if not parts.sinks:
        return means
    size = _recent(parts).size
    sinks = []
    for old, new in ((past.sink_key, local.key), (past.sink_value, local.value)):
        sinks.append(_sunk(old, new[:, :, local.offset :], past.place, max(0, parts.sinks - past.place)))
    reach = torch.tensor([parts.near_from(block * size) for block in blocks], device=means.rows.device)
    place = torch.arange(parts.sinks, device=means.rows.device)
    shown = (place < reach[:, None]).expand(*means.rows.shape[:2], -1, -1)
    rows = torch.cat(sinks, -1).unsqueeze(2).expand(-1, -1, len(blocks), -1, -1)
    excess = torch.zeros_like(shown, dtype=means.excess.dtype).masked_fill(~shown, -torch.inf)
    return ByStep(
        torch.cat([means.rows, rows], 3),
        torch.cat([means.excess, excess], 3),
        torch.cat([means.size, shown.to(means.size.dtype)], 3),
    )
