"""The attention problem: checked by `fewkeys.core.validation.check_inputs` and trusted by all others."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from fewkeys.core.distances import DistanceBias
from fewkeys.core.impl import Impl
from fewkeys.core.totals import WHOLE, Totals

T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class Shard:
    """A part of a sequence: its first key and query; the totals and the sizes of the whole."""

    totals: Totals
    first_key: int
    keys: int
    first_query: int
    queries: int


@dataclass(frozen=True, eq=False)
class Inputs:
    """One attention problem in canonical form.

    query (B, Hq, Nq, D), key (B, Hkv, Nk, D), value (B, Hkv, Nk, Dv): query head h reads key head `h // gqa_ratio`.
    valid: (B, Nk) marks the real keys; None: all. Keys and values of the others are zero if the problem is `cleared`,
        else finite and no larger than others, which suffices under a mask.
    offset: query i is at position `i + offset` among the keys; under causality it sees keys 0 .. i + offset.
    placeholders: so many first queries are zeros in the places of earlier tokens, whose queries are not in memory.
    needs_rescaling: statistics require rescaling first (`fewkeys.core.extent`).
    """

    query: Tensor
    key: Tensor
    value: Tensor
    scale: float
    is_causal: bool = False
    offset: int = 0
    valid: Tensor | None = None
    generator: torch.Generator | None = None
    placeholders: int = 0
    shard: Shard | None = None
    impl: Impl = "auto"
    needs_rescaling: bool = False
    bias: DistanceBias | None = None
    cleared: bool = True
    _memory: dict[Any, Any] = field(default_factory=dict, repr=False)

    @property
    def whole(self) -> Shard:
        """The sequence that statistics are of: these keys and queries, or those of all shards."""
        return Shard(WHOLE, 0, self.keys, 0, self.queries) if self.shard is None else self.shard

    @property
    def batch(self) -> int:
        return self.query.shape[0]

    @property
    def query_heads(self) -> int:
        return self.query.shape[1]

    @property
    def kv_heads(self) -> int:
        return self.key.shape[1]

    @property
    def gqa_ratio(self) -> int:
        return self.query_heads // self.kv_heads

    @property
    def queries(self) -> int:
        return self.query.shape[2]

    @property
    def keys(self) -> int:
        return self.key.shape[2]

    @property
    def head_dim(self) -> int:
        return self.query.shape[3]

    @property
    def value_dim(self) -> int:
        return self.value.shape[3]

    @property
    def valid_queries(self) -> Tensor | None:
        """(B, Nq) marks the queries of real keys, in self-attention (as many queries as keys); None: all."""
        return None if self.queries != self.keys or self.offset else self.valid

    def grouped_query(self) -> Tensor:
        """The queries by the key head that they read, (B, Hkv, gqa_ratio, Nq, D): a view."""
        return torch.unflatten(self.query, 1, (self.kv_heads, self.gqa_ratio))

    def heads(self, index: Tensor | slice, batch: slice = slice(None)) -> Inputs:
        """The problem of the key heads `index` (H,) and their query heads, of some sequences."""
        query, key, value = (rows[batch, index] for rows in (self.grouped_query(), self.key, self.value))
        valid = None if self.valid is None else self.valid[batch]
        bias = None if self.bias is None else self.bias.heads(index, self.gqa_ratio)
        return replace(self, query=query.flatten(1, 2), key=key, value=value, valid=valid, bias=bias, _memory={})

    def from_start(self, reach: int) -> Inputs:
        """The same problem with placeholders for all earlier tokens: the first query is at position 0.

        Queries far behind the last key, which look `reach` positions back in blocks of a power of two, move towards it
        by whole blocks, which changes no output.
        """
        unit = 1 << (self.keys + reach).bit_length()
        count = self.offset if self.offset < 2 * unit else unit + self.offset % unit
        return replace(self, query=pad(self.query, (0, 0, count, 0)), offset=0, placeholders=count, _memory={})

    def clear(self) -> Inputs:
        if self.cleared or self.valid is None:
            return self
        # A product is several times as fast as masked_fill.
        key, value = (rows * self.valid[:, None, :, None].to(rows.dtype) for rows in (self.key, self.value))
        return replace(self, key=key, value=value, cleared=True)

    def branch(self) -> Inputs:
        """The same problem with its own copy of the remembered statistics."""
        return replace(self, _memory=dict(self._memory))

    @property
    def is_fresh(self) -> bool:
        return not self._memory

    def remember(self, name: object, compute: Callable[[], T]) -> T:
        """The statistic `name`, computed at the first call."""
        if name not in self._memory:
            self._memory[name] = compute()
        statistic: T = self._memory[name]
        return statistic
