"""Gathering rows of tokens."""

from __future__ import annotations

import torch
from torch import Tensor


def take(rows: Tensor, index: Tensor) -> Tensor:
    """Rows (B, H, N, D) at index (B, H, ...), int64: (B, H, ..., D). Whole rows move at once; gradients flow."""
    batch, heads, count, dim = rows.shape
    first = torch.arange(batch * heads, device=index.device).view(batch, heads, *[1] * (index.ndim - 2)) * count
    return rows.reshape(-1, dim).index_select(0, (index + first).flatten()).view(*index.shape, dim)
