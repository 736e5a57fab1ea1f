"""Membership masks, and the ids of `Groups` made from them."""

from __future__ import annotations

import torch
from torch import Tensor


def member_ids(member: Tensor) -> Tensor:
    """Ids (B, H, N, M), -1 for none, of the groups that `member` (B, H, N, C, bool) marks; M is the largest number.

    Cost O(n C).
    """
    groups = member.shape[-1]
    most = int(member.sum(-1).max()) if member.numel() else 0
    ids = torch.where(member, torch.arange(groups, device=member.device), -1)
    return ids.topk(most, -1).values


def nearest_members(closeness: Tensor, real: Tensor | None, count: int | Tensor) -> Tensor:
    """Whether a row is among the `count` real rows that are nearest to a group: bool (B, H, N, C).

    `closeness` (B, H, N, C), the larger the nearer; `real` (B, N); `count` a number, or one for each sequence (B,).
    """
    rows = closeness.shape[2]
    most = min(rows, count if isinstance(count, int) else int(count.max()))
    if real is not None:
        closeness = closeness.masked_fill(~real[:, None, :, None], -torch.inf)
    top = closeness.topk(most, 2)
    taken = top.values > -torch.inf
    if isinstance(count, Tensor):
        taken = taken & (torch.arange(most, device=closeness.device)[:, None] < count[:, None, None, None])
    return torch.zeros_like(closeness, dtype=torch.bool).scatter_(2, top.indices, taken)
