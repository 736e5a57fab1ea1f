"""Causal attention over token shards: each rank receives the state of the ranks before it, and sends its own on.

    state of all earlier ranks -> blocks of this shard, one after the other -> state for the next rank
                                  |
                                  all queries of this shard at once, beside what the next rank does

The state is that of a stream (`fewkeys.past.state`): of one size whatever the length. Making it is sequential, as it is
in one process, and a small part of the work; attending is parallel over ranks.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from fewkeys.core.graph import Graph
from fewkeys.core.inputs import Inputs
from fewkeys.core.precision import working
from fewkeys.core.weights import Softmax
from fewkeys.distributed.carry import hand_on, take_over
from fewkeys.distributed.communicator import Communicator
from fewkeys.execute import dispatch
from fewkeys.execute.problem import Problem
from fewkeys.memory.parts import Parts, parts_of
from fewkeys.past.evicted import Evicted
from fewkeys.past.scan import States, advance
from fewkeys.past.state import State
from fewkeys.past.tokens import Stretch
from fewkeys.plan import Plan
from fewkeys.rest import BlockStandIns
from fewkeys.select import RecentBlocks


def check_causal(plan: Plan) -> Parts:
    """The parts of a causal plan that works over ranks; `ValueError` for others."""
    parts = parts_of(plan)
    if parts.recent is None or parts.window:
        raise ValueError(
            f"keep: expected RecentBlocks, and Sinks beside it, the causal rules that work over ranks so far, got "
            f"{plan.keep}; fewkeys.budget(slots, is_causal=True, memory='constant') is such a plan"
        )
    return parts


def attend(inputs: Inputs, plan: Plan, parts: Parts, first: int, comm: Communicator, wanted: bool) -> Tensor:
    """The output (B, Hq, Nq, Dv) of this rank's tokens, the first of which stands at position `first` of the sequence.

    As many queries as keys; there may be none. `wanted`: some rank wants gradients, so that all ranks pass them on.
    """
    key, value = working(inputs.key), working(inputs.value)
    past = State.empty(parts.means, key.detach(), value.detach(), gqa_ratio=inputs.gqa_ratio)
    past = replace(past, near=replace(past.near, key=past.near.key.clone().requires_grad_(wanted)))
    if comm.rank:
        # The gradients of earlier ranks pass through this rank, whatever tensors need gradients here.
        tie = key.new_zeros((), requires_grad=wanted)
        tie = sum((t[:, :, :0].sum().to(tie.dtype) for t in (inputs.query, inputs.key, inputs.value)), tie)
        past = take_over(past, parts, first, comm, tie)
    query = working(inputs.grouped_query().detach()) * inputs.scale
    state = past.append(key, value, query, sinks=parts.sinks)
    states, after = advance(state, _evicted(state, parts), parts.unit, tilted=isinstance(plan.weights, Softmax))
    after = after.trim(parts.needed_from(after.moved))
    token = hand_on(after, parts, comm) if comm.rank + 1 < comm.size else key.new_zeros(())
    output = _output(inputs, plan, parts, past, state, states)
    # The zero ties the next rank's gradients to this rank's backward pass.
    return output + token.to(output.dtype)


def _evicted(state: State, parts: Parts) -> Evicted:
    """The keys that each block but the last evicts, after `state.moved`; none if the plan has no means."""
    starts = range(state.moved + parts.unit, state.length, parts.unit)
    leaving = [range(parts.near_from(start - 1), parts.near_from(start)) for start in starts]
    near = state.near.tokens().but(state.sinks.tokens()).before(state.length if parts.means else 0)
    return Evicted.by_place(near, state.near.first, leaving)


def _output(inputs: Inputs, plan: Plan, parts: Parts, past: State, state: State, states: States) -> Tensor:
    """The output beside the stand-ins `states` that each block sees; `past`, `state`: before and after these tokens."""
    first, count = past.length, inputs.queries
    if not count:
        # No output, but a part in the graph: the ranks before wait for the gradients.
        held = (past.near.key, past.near.value, past.sinks.key, past.sinks.value, past.summary.rows)
        whole = sum((tensor.sum() for tensor in held), torch.zeros(()))
        return inputs.query[..., :1].expand(-1, -1, -1, inputs.value_dim) * whole
    origin = parts.near_from(first)
    near = state.near.between(origin, state.length)
    # Positions are counted from the first key in reach, which begins a block.
    local = Inputs(working(inputs.query), near.key, near.value, inputs.scale, True, first - origin)
    recent = RecentBlocks(*(parts.recent or (parts.unit,)))
    blocks = range(first // parts.unit, (first + count - 1) // parts.unit + 1)
    # One of the first block's stand-ins may be before its beginning: where no token of it has come yet.
    current = slice(blocks.start - past.moved // parts.unit, None)
    means = States(*(part[:, :, current] for part in (states.rows, states.excess, states.size)))
    stand_ins = BlockStandIns(_beside_sinks(means, state.sinks, parts, blocks), inputs.head_dim)
    graph = Graph(local, columns=recent.select(local).columns)
    return dispatch.attend(Problem(local, graph, stand_ins, plan.weights)).to(inputs.query.dtype)


def _beside_sinks(means: States, sinks: Stretch, parts: Parts, blocks: range) -> States:
    """The stand-ins of every block, and the sinks that its recent blocks do not reach: each stands in for itself."""
    if not sinks.count:
        return means
    reach = torch.tensor([parts.near_from(block * parts.unit) for block in blocks], device=means.rows.device)
    shown = sinks.tokens().place.unsqueeze(2) < reach[:, None]
    rows = torch.cat([sinks.key, sinks.value], -1).unsqueeze(2).expand(-1, -1, len(blocks), -1, -1)
    excess = torch.zeros_like(shown, dtype=means.excess.dtype).masked_fill(~shown, -torch.inf)
    return States(
        torch.cat([means.rows, rows], 3),
        torch.cat([means.excess, excess], 3),
        torch.cat([means.size, shown.to(means.size.dtype)], 3),
    )
