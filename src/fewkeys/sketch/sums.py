"""Weighted sums of keys and values, by cluster or over all."""

from __future__ import annotations

from torch import Tensor

from fewkeys import native
from fewkeys.sketch.backend import backend
from fewkeys.sketch.gram import working


def label_sums(key: Tensor, value: Tensor, label: Tensor, share: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """`sum_{j: label_j = c} share_j x_j` of keys (B, H, N, D) and values (B, H, N, Dv): (B, H, count, D or Dv).

    `label` (B, H, N), int64, 0 .. count - 1, and `share` (B, H, N) carry no gradient; keys and values do. In working
    precision.
    """
    if (kernels := backend(key, value, share)) is not None:
        found = kernels.label_sums(key, value, label, share, count)
        return found[..., : key.shape[-1]], found[..., key.shape[-1] :]
    member = members(label, share, count).mT
    return member @ working(key), member @ working(value)


def sums_and_products(
    key: Tensor, value: Tensor, label: Tensor, share: Tensor, count: int, middle: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """`label_sums`, and beside them `sum_j share_j (k_j - middle) v_j^T` (B, H, D, Dv); middle (B, H, 1, D).

    `middle` carries no gradient either.
    """
    if native.suits(key, value, share, middle):
        found, products = native.sums_and_products(key, value, label, share, count, middle)
        return found[..., : key.shape[-1]], found[..., key.shape[-1] :], products
    products = ((working(key) - middle) * share.unsqueeze(-1)).mT @ working(value)
    return *label_sums(key, value, label, share, count), products


def members(label: Tensor, share: Tensor, count: int) -> Tensor:
    """(..., N, count): shares (..., N), each in the column of its label."""
    found = share.new_zeros((*share.shape, count))
    return found.scatter_(-1, label.unsqueeze(-1), share.unsqueeze(-1))
