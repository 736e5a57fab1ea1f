"""Weighted sums of keys and values, by cluster or over all."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import fewkeys.native as native
from fewkeys.core.impl import COMPILED, Impl
from fewkeys.core.precision import working
from fewkeys.sketch.backend import compiled


def label_sums(
    key: Tensor, value: Tensor, label: Tensor, share: Tensor, count: int, impl: Impl
) -> tuple[Tensor, Tensor]:
    """`sum_{j: label_j = c} share_j x_j` of keys (B, H, N, D) and values (B, H, N, Dv): (B, H, count, D or Dv).

    `label` (B, H, N), int64, 0 .. count - 1, and `share` (B, H, N) carry no gradient; keys and values do. In working
    precision, by the kernels of `impl`.
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
    if impl in COMPILED and native.readable(key, value, share, middle):
        sums, products = _Summed.apply(key, value, label, share, count, middle)  # type: ignore[no-untyped-call]
        return sums[..., : key.shape[-1]], sums[..., key.shape[-1] :], products
    products = ((working(key) - middle) * share.unsqueeze(-1)).mT @ working(value)
    return *label_sums(key, value, label, share, count, impl), products


class _Summed(torch.autograd.Function):
    """The kernel with gradients of keys and values: key j enters the sums of its label and the products by share_j."""

    @staticmethod
    def forward(
        ctx: Any, key: Tensor, value: Tensor, label: Tensor, share: Tensor, count: int, middle: Tensor
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(key, value, label, share, middle)
        return native.sums_and_products(key, value, label, share, count, middle)

    @staticmethod
    def backward(ctx: Any, sums: Tensor, products: Tensor) -> Any:
        key, value, label, share, middle = ctx.saved_tensors
        rows = sums.gather(2, label.unsqueeze(-1).expand(*label.shape, sums.shape[-1]))
        to_key, to_value = rows.split([key.shape[-1], value.shape[-1]], -1)
        to_key = (to_key + working(value) @ products.mT) * share.unsqueeze(-1)
        to_value = (to_value + (working(key) - middle) @ products) * share.unsqueeze(-1)
        return to_key.to(key.dtype), to_value.to(value.dtype), None, None, None, None


def members(label: Tensor, share: Tensor, count: int) -> Tensor:
    """(..., N, count): shares (..., N), each in the column of its label."""
    return share.new_zeros((*share.shape, count)).scatter_(-1, label.unsqueeze(-1), share.unsqueeze(-1))
