"""What a rank needs from the others: neighbouring rows and the kept keys."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from fewkeys.core.inputs import Inputs
from fewkeys.core.precision import working
from fewkeys.core.rows import marked_places
from fewkeys.distributed.communicator import Communicator
from fewkeys.distributed.selection import KeptKeys
from fewkeys.distributed.totals import gather


def edges_of(rows: Tensor, tokens: Sequence[int], left: int, right: int, comm: Communicator) -> tuple[Tensor, Tensor]:
    """The `left` rows (B, H, ., F) before this rank's first row and the `right` rows after its last, or fewer.

    `tokens`: the number of rows on each rank.
    """
    edges = []
    for count, before in ((left, True), (right, False)):
        if not count:
            edges.append(rows[:, :, :0])
            continue
        counts = [min(count, n) for n in tokens]
        sent = counts[comm.rank]
        part = rows[:, :, rows.shape[2] - sent :] if before else rows[:, :, :sent]
        gathered = gather(part, max(counts), comm)
        # Gradients must pass even where this rank uses no gathered row: the other ranks wait for its backward pass.
        unused = gathered[..., :0].sum() if gathered.requires_grad else 0.0
        ranks = range(comm.rank) if before else range(comm.rank + 1, comm.size)
        beside = torch.cat([rows[:, :, :0], *(gathered[rank, :, :, : counts[rank]] for rank in ranks)], 2)
        edges.append((beside[:, :, max(0, beside.shape[2] - count) :] if before else beside[:, :, :count]) + unused)
    return edges[0], edges[1]


def columns_of(
    kept: KeptKeys, tokens: Sequence[int], near: range, base: Tensor, comm: Communicator
) -> tuple[Tensor, Tensor]:
    """The row, on this rank, of every kept key, and which entries are used.

    A key in `near` has its own row. The others follow from `base` (H, 1) on, rank by rank, each with `kept.width` rows.
    """
    places = torch.stack(comm.all_gather(pad(kept.index, (0, kept.width - kept.index.shape[-1]))))
    firsts = torch.tensor([sum(tokens[:rank]) for rank in range(comm.size)], device=places.device).view(-1, 1, 1, 1)
    used = torch.arange(kept.width, device=places.device) < kept.counts.unsqueeze(-1)
    position, used = ((part.movedim(0, 2).flatten(2)) for part in (places + firsts, used))
    is_near = (position >= near.start) & (position < near.stop)
    index = torch.where(is_near, position - near.start, base + torch.arange(position.shape[-1], device=position.device))
    order = marked_places(used)
    return index.gather(-1, order), used.gather(-1, order)


def no_output(inputs: Inputs, parts: Sequence[Tensor | None]) -> Tensor:
    """The empty output of a rank without queries. It depends on the parts: other ranks wait for their backward pass."""
    tie = sum((part.sum() for part in parts if part is not None), working(inputs.key).new_zeros(()))
    return inputs.query[..., :1].expand(-1, -1, -1, inputs.value_dim) * tie.to(inputs.query.dtype)
