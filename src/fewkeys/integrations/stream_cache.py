"""The transformers side of `fewkeys.cache`: imported only where transformers is installed."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, CacheLayerMixin

from fewkeys.integrations.layer_stream import LayerStream, attach
from fewkeys.integrations.streams import Length
from fewkeys.plan import Plan


class StreamLayer(CacheLayerMixin):
    """One layer of a `StreamCache`."""

    is_sliding = False
    supports_early_init = False

    def __init__(self, own: LayerStream) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.own = own

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing is allocated before the first attention call."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """The new keys and values alone; the rest is in the stream."""
        self.own.expect(key_states, value_states)
        return key_states, value_states

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Length and offset of the keys that `update` returns."""
        return Length(query_length), self.get_seq_length()

    def get_seq_length(self) -> int:
        """All tokens seen, whatever is left of them."""
        return self.own.length

    def get_max_length(self) -> int:
        """No maximum."""
        return -1

    get_max_cache_shape = get_max_length  # the name in earlier versions

    def reset(self) -> None:
        """Forget everything."""
        self.own.stream = self.own.expected = None

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Reorder the sequences for beam search."""
        self.own.select(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep these sequences."""
        self.own.select(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every sequence."""
        stream = self.own.stream
        if stream is not None and stream.batch is not None:
            self.own.select(torch.arange(stream.batch).repeat_interleave(repeats))

    def crop(self, tokens_to_remove: int) -> None:
        """Take back the newest `-tokens_to_remove` tokens; `ValueError` where they are summarised already."""
        if tokens_to_remove > 0:
            raise ValueError(f"tokens_to_remove: expected zero or less, got {tokens_to_remove}")
        self.own.crop(self.own.length + tokens_to_remove)

    def offload(self) -> None:
        """Streams stay where they are: they are small."""

    def prefetch(self) -> None:
        """Streams stay where they are."""


class StreamCache(Cache):
    """One stream per layer; made by `fewkeys.cache`."""

    def __init__(self, model: PreTrainedModel, plans: Sequence[Plan]) -> None:
        self._own = [LayerStream(plan) for plan in plans]
        super().__init__(layers=[StreamLayer(own) for own in self._own])
        self._model = weakref.ref(model)
        self._attached = attach(model, self)

    def close(self) -> None:
        """Give the model its own attention back; the cache is of no more use."""
        self._attached()

    def memory(self) -> int:
        """Bytes held by all layers."""
        return sum(own.stream.memory() for own in self._own if own.stream is not None)

    def __deepcopy__(self, memo: dict[int, Any]) -> StreamCache:
        model = self._model()
        if model is None:
            raise ValueError(
                "past_key_values: expected a cache whose model is still there, got one whose model is gone"
            )
        found = StreamCache(model, [own.plan for own in self._own])
        for new, own in zip(found._own, self._own, strict=True):
            new.stream = copy.deepcopy(own.stream, memo)
        return found
