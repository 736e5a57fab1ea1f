"""Weighted sums of rows by label."""

import torch
from torch import Tensor
from torch.nn.functional import pad

from fewkeys.core.rows import take

CHUNK = 32
"""Rows of one label that `sums_by_label` adds in one product."""


def members(label: Tensor, share: Tensor, count: int) -> Tensor:
    """(..., N, count): shares (..., N), each in the column of its label."""
    return share.new_zeros((*share.shape, count)).scatter_(-1, label.unsqueeze(-1), share.unsqueeze(-1))


def sums_by_label(rows: Tensor, weights: Tensor, label: Tensor, count: int) -> Tensor:
    """`sum_{j: label_j = c} weights_hj x_j` (B, H, M, count, X) of rows (B, H, N, X), weights (B, H, M, N), labels
    (B, H, N).

    Cost O(T M X) with T = N + count `CHUNK`, memory O(T (M + X)) for M up to `CHUNK`: one product of matrices for each
    chunk. For M = 1 there is one product for all rows, of cost O(N count X).
    """
    if weights.shape[2] == 1:
        return (members(label, weights.squeeze(2), count).mT @ rows).unsqueeze(2)
    place, of_chunk = _chunks(label, count)
    chunks = torch.unflatten(take(pad(rows, (0, 0, 0, 1)), place), 2, (-1, CHUNK))
    share = pad(weights, (0, 1)).gather(-1, place.unsqueeze(2).expand(-1, -1, weights.shape[2], -1))
    sums = torch.unflatten(share, 3, (-1, CHUNK)).transpose(2, 3) @ chunks
    none = sums.new_zeros((*sums.shape[:2], count, *sums.shape[3:]))
    return none.scatter_add(2, of_chunk[..., None, None].expand_as(sums), sums).transpose(2, 3)


def _chunks(label: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The rows of every chunk, N where it has no more; and the labels of the chunks."""
    rows, device = label.shape[2], label.device
    total = rows // CHUNK + count  # at least the chunks that are needed
    ordered, order = label.sort(dim=-1, stable=True)
    first = torch.searchsorted(ordered, torch.arange(count + 1, device=device).repeat(*label.shape[:2], 1))
    end = (-(-first.diff(dim=-1) // CHUNK)).cumsum(-1)
    begin = pad(end, (1, 0)).gather(-1, ordered)
    slot = CHUNK * begin + torch.arange(rows, device=device) - first.gather(-1, ordered)
    place = torch.full((*label.shape[:2], CHUNK * total), rows, device=device).scatter_(-1, slot, order)
    chunk = torch.arange(total, device=device).repeat(*label.shape[:2], 1)
    return place, torch.searchsorted(end, chunk, right=True).clamp_max(count - 1)
