"""What is left of a context after one prefill, and what a token that comes later pays for it.

Rows of this package: all keys and the exact answer, and the caches of `fewkeys.cache`. Those that drop keys of the
context by a rival's own code are in `presses.py`.
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
    """Of a query token, averaged over those judged.

    slots: keys (and stand-ins) a query head attends to. read: bytes of keys, values, codes and sums that a layer reads
    for one token; query heads that read the same rows read them once. held: bytes of the whole cache at the end.
    """

    slots: float
    read: float
    held: float


@dataclass(frozen=True)
class Memory:
    """A cache that holds a context. price(first, tokens): what queries first .. tokens - 1 pay, asked afterwards."""

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
        own = model.config
        dim = getattr(own, "head_dim", None) or own.hidden_size // own.num_attention_heads
        heads, kv_heads = own.num_attention_heads, own.num_key_value_heads
        return Shape(own.num_hidden_layers, heads, kv_heads, dim, model.dtype.itemsize)

    def rows(self, count: float) -> float:
        """Bytes of so many keys and values of each key head of a layer."""
        return self.kv_heads * count * 2 * self.dim * self.number

    def dropping(self, kept: float, context: int) -> Callable[[int, int], Price]:
        """The price where `kept` keys of the context are left, and all that come later are added."""

        def price(first: int, tokens: int) -> Price:
            slots = kept + (first + tokens + 1) / 2 - context
            return Price(slots, self.rows(slots), self.layers * self.rows(kept + tokens - context))

        return price


@dataclass(frozen=True, eq=False)
class Call:
    """One layer's attention call during the prefill: what a forward hook is given."""

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
        """What every layer was given, in order; its keys and values are in the cache among the arguments."""
        from transformers import DynamicCache

        calls: list[Call] = []
        hooks = [
            module.register_forward_hook(
                lambda module, _, arguments, output: calls.append(Call(module, arguments, output)), with_kwargs=True
            )
            for module in attention_modules(self.model)
        ]
        try:
            # Newer versions of transformers do not say positions to a layer unless they are passed, and presses ask.
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
        """A cache of its own with all keys and values."""
        from transformers import DynamicCache

        cache = DynamicCache()
        for layer, (key, value) in enumerate(self.rows):
            cache.update(key.clone(), value.clone(), layer)
        return cache


@contextmanager
def everything(prefill: Prefill, slots: int) -> Iterator[Memory]:
    """All keys and exact attention: what the others are compared with."""
    yield Memory(prefill.copy(), Shape.of(prefill.model).dropping(prefill.length, prefill.length))


@dataclass(frozen=True)
class Streams:
    """`fewkeys.cache` under a plan, filled by exact attention or, `from_first`, by the plan as well."""

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
        if not plan.scanned:  # one set of keys serves all queries of a token
            return Price(slots, shape.rows(slots), cache.memory())
        means = plan.rest.count if isinstance(plan.rest, BlockMeans) else 0
        # int8: a byte a number, and a scale for the key and one for the value.
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
"""From a prefill and a number of slots to a memory, which is open inside `with`."""
