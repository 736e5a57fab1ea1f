"""Rows of tokens, and places of some of them."""

import math

import torch
from torch import Tensor
from torch.nn.functional import pad


def take(rows: Tensor, index: Tensor) -> Tensor:
    """Rows (H.., N, D) at index (H.., ...), int64: (H.., ..., D). Whole rows move at once; gradients flow."""
    *heads, count, dim = rows.shape
    first = torch.arange(math.prod(heads), device=index.device) * count
    first = first.view(*heads, *[1] * (index.ndim - len(heads)))
    return rows.reshape(-1, dim).index_select(0, (index + first).flatten()).view(*index.shape, dim)


def stretch(rows: Tensor, first: int, last: int) -> Tensor:
    """The rows `first` to `last - 1` of (..., N, D); zeros where there is no such row."""
    count = rows.shape[-2]
    inner = rows[..., min(max(first, 0), count) : min(max(last, 0), count), :]
    before = min(max(-first, 0), last - first)
    after = last - first - before - inner.shape[-2]
    return pad(inner, (0, 0, before, after)) if before or after else inner


def marked_places(marked: Tensor, least: int = 0) -> Tensor:
    """The places of the true entries of every row of (..., N), ascending. All lists are as long as the longest, at
    least `least`, and end with places of other entries.
    """
    longest = max(least, int(marked.sum(-1).max()) if marked.numel() else 0)
    return marked.to(torch.int8).argsort(dim=-1, descending=True, stable=True)[..., :longest]
