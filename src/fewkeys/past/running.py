"""Moments of the queries and keys so far, per sequence and key head, in working precision, without gradient."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fewkeys.core.fields import Fields
from fewkeys.sketch.clusters import QueryMoments


@dataclass(frozen=True, eq=False)
class RunningQueries(Fields):
    """Sums over scaled queries: `count` (B, 1), `total` (B, Hkv, 1, D), `square` (B, Hkv, D, D), the sum of `q q^T`."""

    count: Tensor
    total: Tensor
    square: Tensor

    @staticmethod
    def empty(key: Tensor) -> RunningQueries:
        batch, heads, _, dim = key.shape
        return RunningQueries(
            key.new_zeros((batch, 1)), key.new_zeros((batch, heads, 1, dim)), key.new_zeros((batch, heads, dim, dim))
        )

    def add(self, query: Tensor, real: Tensor) -> RunningQueries:
        """The sums with further scaled queries (B, Hkv, gqa_ratio, N, D), those that are `real` (B, N)."""
        rows = (query * real[:, None, None, :, None]).flatten(2, 3)
        count = self.count + real.sum(-1, keepdim=True) * query.shape[2]
        return RunningQueries(count, self.total + rows.sum(-2, keepdim=True), self.square + rows.mT @ rows)

    def moments(self) -> QueryMoments:
        """Mean and second moment. One query of covariance I / D is added: both are defined before the first query."""
        dim = self.total.shape[-1]
        count = (self.count + 1)[:, :, None, None]
        prior = torch.eye(dim, dtype=self.square.dtype, device=self.square.device) / dim
        return QueryMoments(self.total / count, (self.square + prior) / count)


@dataclass(frozen=True, eq=False)
class RunningKeys(Fields):
    """Sums over keys: `count` (B, Hkv), `key` (B, Hkv, 1, D), `value` (B, Hkv, 1, Dv), `square` (B, Hkv): sum |v|^2."""

    count: Tensor
    key: Tensor
    value: Tensor
    square: Tensor

    @staticmethod
    def empty(key: Tensor, value: Tensor) -> RunningKeys:
        total, value_total = (rows.new_zeros((*rows.shape[:2], 1, rows.shape[3])) for rows in (key, value))
        return RunningKeys(key.new_zeros(key.shape[:2]), total, value_total, key.new_zeros(key.shape[:2]))

    def add(self, key: Tensor, value: Tensor, real: Tensor) -> RunningKeys:
        """The sums with further keys (B, Hkv, N, D) and values, zero where not `real` (B, Hkv, N)."""
        return RunningKeys(
            self.count + real.sum(-1),
            self.key + key.sum(-2, keepdim=True),
            self.value + value.sum(-2, keepdim=True),
            self.square + value.square().sum((-2, -1)),
        )

    def means(self) -> tuple[Tensor, Tensor, Tensor]:
        """Mean key (B, Hkv, 1, D), mean value (B, Hkv, 1, Dv), and 1 / mean |v - mean|^2 (B, Hkv, 1, 1)."""
        count = self.count.clamp_min(1)[:, :, None, None]
        key, value = self.key / count, self.value / count
        spread = self.square[:, :, None, None] / count - value.square().sum(-1, keepdim=True)
        return key, value, 1 / spread.clamp_min(torch.finfo(spread.dtype).eps)
