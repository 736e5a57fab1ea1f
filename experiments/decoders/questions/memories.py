"""Caches of a context after one prefill, and what a later token pays to read them.

Here are those of this package: all keys with exact attention, and `fewkeys.cache`. `presses.py` has those of kvpress,
which drop keys of the context.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from experiments.decoders.methods import EXACT, PLANS, paid_by
from torch import Tensor, nn

import fewkeys as fk
from fewkeys.integrations.interface import attention_modules
from fewkeys.rest import BlockMeans

SUM = torch.float64.itemsize
"""Bytes of a number in the running sums from which means are taken."""


@dataclass(frozen=True)
class Price:
    """The price of a query token, averaged over the judged tokens.

    slots: keys (and stand-ins) a query head attends to. read: bytes of keys, values, codes and sums that a layer reads
    for one token; rows that several query heads read count once. held: bytes of the whole cache at the end.
    """

    slots: float
    read: float
    held: float


@dataclass(frozen=True)
class Memory:
    """A cache that holds a context. price(first, tokens): what queries first .. tokens - 1 paid for their answers."""

    cache: Any
    price: Callable[[int, int], Price]


@dataclass(frozen=True)
class Shape:
    """The heads of a model and the bytes of one number."""

    layers: int
    heads: int
    kv_heads: int
    dim: int
    number: int

    @staticmethod
    def of(model: Any) -> Shape:
        config = model.config
        dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
        return Shape(config.num_hidden_layers, heads, kv_heads, dim, model.dtype.itemsize)

    def rows(self, count: float) -> float:
        """Bytes of `count` keys and values of each key head of a layer."""
        return self.kv_heads * count * 2 * self.dim * self.number

    def dropping(self, kept: float, context: int) -> Callable[[int, int], Price]:
        """The price of `kept` keys of the context and all keys that come later."""

        def price(first: int, tokens: int) -> Price:
            slots = kept + (first + tokens + 1) / 2 - context
            return Price(slots, self.rows(slots), self.layers * self.rows(kept + tokens - context))

        return price


@dataclass(frozen=True, eq=False)
class Call:
    """One layer's attention call during the prefill, as a forward hook sees it."""

    module: nn.Module
    arguments: dict[str, Any]
    output: Any


@dataclass(frozen=True, eq=False)
class Prefill:
    """A context (1, N), read by exact attention once for all rows."""

    model: Any
    tokens: Tensor

    @property
    def length(self) -> int:
        return self.tokens.shape[1]

    @cached_property
    @torch.no_grad()
    def calls(self) -> tuple[Call, ...]:
        """The call of every layer, in order. Keys and values are in the cache among the arguments."""
        from transformers import DynamicCache

        calls: list[Call] = []
        hooks = [
            module.register_forward_hook(
                lambda module, _, arguments, output: calls.append(Call(module, arguments, output)), with_kwargs=True
            )
            for module in attention_modules(self.model)
        ]
        try:
            # Presses read the positions, which newer versions of transformers hand to a layer only if they are passed.
            places = torch.arange(self.length)
            self.model.model(self.tokens, past_key_values=DynamicCache(), cache_position=places)
        finally:
            for hook in hooks:
                hook.remove()
        return tuple(calls)

    @property
    def rows(self) -> list[tuple[Tensor, Tensor]]:
        """Keys and values (1, Hkv, N, D) of every layer."""
        layers = self.calls[0].arguments["past_key_values"].layers
        return [(layer.keys, layer.values) for layer in layers]

    def copy(self) -> Any:
        """A new cache with copies of all keys and values."""
        from transformers import DynamicCache

        cache = DynamicCache()
        for layer, (key, value) in enumerate(self.rows):
            cache.update(key.clone(), value.clone(), layer)
        return cache


@contextmanager
def everything(prefill: Prefill, slots: int) -> Iterator[Memory]:
    """All keys and exact attention, the reference."""
    yield Memory(prefill.copy(), Shape.of(prefill.model).dropping(prefill.length, prefill.length))


@dataclass(frozen=True)
class Streams:
    """`fewkeys.cache` with a plan. The prefill is exact, or by the plan too with `from_first`."""

    plan: Callable[[int], fk.Plan]
    leaves: Any = None
    from_first: bool = False

    @contextmanager
    def __call__(self, prefill: Prefill, slots: int) -> Iterator[Memory]:
        model, plan = prefill.model, self.plan(slots).never_exact()
        cache: Any = fk.cache(model, plan, leaves=self.leaves)
        try:
            if self.from_first:
                model.model(prefill.tokens, past_key_values=cache)
            else:
                for layer, (key, value) in zip(cache.layers, prefill.rows, strict=True):
                    layer.calls[0].append(key, value)
            yield Memory(cache, lambda first, tokens: self._price(model, plan, cache, first, tokens))
        finally:
            cache.close()

    def _price(self, model: Any, plan: fk.Plan, cache: Any, first: int, tokens: int) -> Price:
        shape = Shape.of(model)
        slots = paid_by(plan, model.config, tokens, first)
        if not plan.scanned:  # all query heads of a key head read the same keys
            return Price(slots, shape.rows(slots), cache.memory())
        means = plan.rest.count if isinstance(plan.rest, BlockMeans) else 0
        # int8: one byte a number, one scale for the key and one for the value.
        row = 2 * shape.dim * shape.number if self.leaves == "model" else 2 * (shape.dim + torch.float32.itemsize)
        codes = (first + tokens + 1) / 2 * (shape.dim / 4 + 2)
        shared = codes + (means + 1) * 2 * shape.dim * SUM
        read = shape.heads * (slots - means) * row + shape.kv_heads * shared
        return Price(slots, read, cache.memory())


OURS = "fewkeys"
MEMORIES: dict[str, Callable[[Prefill, int], Any]] = {
    EXACT: everything,
    OURS: Streams(PLANS[OURS]),
    "fewkeys, float32": Streams(PLANS[OURS], leaves="model"),
    "fewkeys, prefill too": Streams(PLANS[OURS], from_first=True),
    "constant memory": Streams(PLANS["constant memory"]),
    "sinks + window": Streams(PLANS["sinks + window"]),
}
"""Functions of a prefill and a number of slots; each returns a context manager of a memory."""
