"""What a rank needs from the others: statistics of the whole sequence, neighbouring rows, and the kept keys."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from fewkeys.core.inputs import Inputs, Shard
from fewkeys.core.precision import working
from fewkeys.core.rows import marked_places
from fewkeys.distributed.communicator import Communicator
from fewkeys.distributed.gather import gather
from fewkeys.distributed.keys import OverRanks
from fewkeys.distributed.selection import KeptKeys
from fewkeys.rest.base import CohortStandIns


def whole(inputs: Inputs, tokens: list[int], asked: list[int], comm: Communicator, wanted: bool = False) -> Inputs:
    """The inputs of this rank, whose statistics are those of the whole sequence.

    `tokens`, `asked`: the number of keys and of queries on each rank. `wanted`: whether any rank needs gradients; then
    every rank takes part in the backward pass.
    """
    shard = Shard(OverRanks(comm), sum(tokens[: comm.rank]), sum(tokens), sum(asked[: comm.rank]), sum(asked))
    key = inputs.key.detach().requires_grad_() if wanted and not inputs.key.requires_grad else inputs.key
    return replace(inputs, key=key, shard=shard, _memory={})


def edges_of(rows: Tensor, tokens: list[int], left: int, right: int, comm: Communicator) -> tuple[Tensor, Tensor]:
    """The `left` rows (B, H, ., F) before this rank's first row and the `right` rows after its last, or fewer."""
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
        # Gradients must pass even where this rank uses no gathered row: the other ranks wait for its backward pass.
        unused = stacked[:, :, :, :0].sum() if stacked.requires_grad else 0.0
        ranks = range(comm.rank) if before else range(comm.rank + 1, comm.size)
        beside = torch.cat([rows[:, :, :0], *(stacked[:, :, rank, : counts[rank]] for rank in ranks)], 2)
        edges.append((beside[:, :, max(0, beside.shape[2] - count) :] if before else beside[:, :, :count]) + unused)
    return edges[0], edges[1]


def columns_of(
    kept: KeptKeys, tokens: list[int], near: range, base: Tensor, comm: Communicator
) -> tuple[Tensor, Tensor]:
    """The row, on this rank, of every kept key. A key in `near` has its own row. The others follow from `base` (H, 1)
    on, in the order in which `gather` stacks them.
    """
    width = max(1, int(kept.counts.max()))
    places = torch.stack(comm.all_gather(pad(kept.index, (0, width - kept.index.shape[-1]))))
    firsts = torch.tensor([sum(tokens[:rank]) for rank in range(comm.size)], device=places.device).view(-1, 1, 1, 1)
    used = torch.arange(width, device=places.device) < kept.counts.unsqueeze(-1)
    position = (places + firsts).permute(1, 2, 0, 3).flatten(2)
    used = used.permute(1, 2, 0, 3).flatten(2)
    inside = (position >= near.start) & (position < near.stop)
    index = torch.where(inside, position - near.start, base + torch.arange(position.shape[-1], device=position.device))
    order = marked_places(used)
    return index.gather(-1, order), used.gather(-1, order)


def nothing(inputs: Inputs, rows: list[Tensor], stand_ins: CohortStandIns | None) -> Tensor:
    """The empty output of a rank without queries. It stays in the autograd graph: other ranks wait for its backward."""
    parts = [*rows]
    if stand_ins is not None:
        parts += [stand_ins.key, stand_ins.value]
        parts += [part for part in (stand_ins.left, stand_ins.right) if part is not None]
    tie = sum((part.sum() for part in parts), working(inputs.key).new_zeros(()))
    return inputs.query[..., :1].expand(-1, -1, -1, inputs.value_dim) * tie.to(inputs.query.dtype)
