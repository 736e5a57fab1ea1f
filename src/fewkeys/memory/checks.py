"""Checks of the tokens and queries that a stream receives."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from fewkeys.core.precision import lowered, widened
from fewkeys.core.validation import check_finite, check_tensor, check_valid, largest_entries


class Kind(NamedTuple):
    """The sizes, dtype and device of tokens, which stay the same in a stream."""

    batch: int
    heads: int
    dim: int
    value_dim: int
    dtype: torch.dtype
    device: torch.device

    def __str__(self) -> str:
        sizes = f"batch {self.batch}, {self.heads} key heads, dimensions {self.dim} (key) and {self.value_dim} (value)"
        return f"{sizes} in {self.dtype} on {self.device}"

    @staticmethod
    def of(key: Tensor, value: Tensor) -> Kind:
        batch, heads, _, dim = key.shape
        return Kind(batch, heads, dim, value.shape[3], key.dtype, key.device)

    def no_tokens(self) -> tuple[Tensor, Tensor]:
        """Keys (B, Hkv, 0, D) and values (B, Hkv, 0, Dv)."""
        like = torch.empty((self.batch, self.heads, 0, 0), dtype=self.dtype, device=self.device)
        return like.new_empty((*like.shape[:3], self.dim)), like.new_empty((*like.shape[:3], self.value_dim))


class NewTokens(NamedTuple):
    """Checked keys (B, Hkv, N, D) and values (B, Hkv, N, Dv), which are `real` (B, N; None: all), and the `largest`
    magnitudes of both.
    """

    key: Tensor
    value: Tensor
    real: Tensor | None
    largest: list[float]

    def select(self, sequences: Tensor | slice, tokens: slice) -> NewTokens:
        real = None if self.real is None else self.real[sequences, tokens]
        return NewTokens(self.key[sequences, :, tokens], self.value[sequences, :, tokens], real, self.largest)


def check_tokens(key: object, value: object, key_mask: object, before: Kind | None) -> NewTokens:
    """Copies of tokens, `widened`. `ValueError` unless keys and values match each other and the tokens `before`."""
    k, v = (widened(lowered(check_tensor(name, rows).detach())) for name, rows in (("key", key), ("value", value)))
    if v.shape[:3] != k.shape[:3] or v.dtype != k.dtype or v.device != k.device:
        raise ValueError(
            f"value: expected {tuple(k.shape[:3])} (batch, heads, tokens), {k.dtype} on {k.device} like key, got "
            f"{tuple(v.shape[:3])}, {v.dtype} on {v.device}"
        )
    real = check_valid(None, key_mask, k)
    if real is None:
        k, v = k.clone(), v.clone()
    else:
        real = real.clone()
        k, v = (rows.masked_fill(~real[:, None, :, None], 0.0) for rows in (k, v))
    tokens, kind = NewTokens(k, v, real, largest_entries(k, v)), Kind.of(k, v)
    if before is not None and kind != before:
        fix = "; for more sequences use select(index) of a stream, or batch_repeat_interleave(n) of a cache"
        more = fix if kind.batch != before.batch else ""
        raise ValueError(f"key: expected {before} like the tokens before, got {kind}{more}")
    if not all(map(math.isfinite, tokens.largest)):
        check_finite(key=k, value=v)
    return tokens


def check_query(query: Tensor, key: Tensor, query_heads: int | None) -> float:
    """The largest magnitude in the queries. `ValueError` unless they match the last of these keys and the number of
    heads of earlier queries (None: there were none).
    """
    (batch, heads, tokens, dim), shape = key.shape, query.shape
    if query_heads is not None and shape[1] != query_heads:
        raise ValueError(f"query: expected {query_heads} heads, like the queries before, got {shape[1]}")
    if shape[0] != batch or shape[1] % heads or shape[2] > tokens or shape[3] != dim or query.dtype != key.dtype:
        raise ValueError(
            f"query: expected ({batch}, a multiple of {heads}, at most {tokens}, {dim}) in {key.dtype} for the "
            f"tokens last appended, got {tuple(shape)} in {query.dtype}"
        )
    (largest,) = largest_entries(query)
    if not math.isfinite(largest):
        check_finite(query=query)
    return largest
