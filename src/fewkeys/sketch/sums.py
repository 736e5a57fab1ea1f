"""Weighted sums of keys and values, by cluster or over all."""

from __future__ import annotations

from torch import Tensor

import fewkeys.native as native
from fewkeys.core.impl import Impl
from fewkeys.core.precision import working
from fewkeys.sketch.backend import compiled


def label_sums(
    key: Tensor, value: Tensor, label: Tensor, share: Tensor, count: int, impl: Impl
) -> tuple[Tensor, Tensor]:
    """`sum_{j: label_j = c} share_j x_j` of keys (B, H, N, D) and values (B, H, N, Dv): (B, H, count, D or Dv).

    In working precision. `label` (B, H, N), int64, and `share` (B, H, N) carry no gradient; keys and values do.
    """
    if compiled(impl, key, value, share):
        sums = native.label_sums(key, value, label, share, count)
        return sums[..., : key.shape[-1]], sums[..., key.shape[-1] :]
    member = members(label, share, count).mT
    return member @ working(key), member @ working(value)


def sums_and_products(
    key: Tensor, value: Tensor, label: Tensor, share: Tensor, count: int, middle: Tensor, impl: Impl
) -> tuple[Tensor, Tensor, Tensor]:
    """`label_sums`, and `sum_j share_j (k_j - middle) v_j^T` (B, H, D, Dv); middle (B, H, 1, D) has no gradient."""
    if compiled(impl, key, value, share, middle):
        sums, products = native.sums_and_products(key, value, label, share, count, middle)
        return sums[..., : key.shape[-1]], sums[..., key.shape[-1] :], products
    products = ((working(key) - middle) * share.unsqueeze(-1)).mT @ working(value)
    return *label_sums(key, value, label, share, count, impl), products


def members(label: Tensor, share: Tensor, count: int) -> Tensor:
    """(..., N, count): shares (..., N), each in the column of its label."""
    return share.new_zeros((*share.shape, count)).scatter_(-1, label.unsqueeze(-1), share.unsqueeze(-1))
