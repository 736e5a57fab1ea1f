"""The transformers side of `fewkeys.cache`: imported only where transformers is installed."""

from __future__ import annotations

import copy
import os
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, CacheLayerMixin

from fewkeys.captures.capture import AttentionInputs
from fewkeys.integrations import interface, streams
from fewkeys.integrations.streams import Length
from fewkeys.plan import Plan
from fewkeys.streaming import Stream, files


class StreamLayer(CacheLayerMixin):
    """One layer of a `StreamCache`: its stream, made when the first tokens are attended from."""

    is_sliding = False
    is_croppable = True
    supports_early_init = False

    def __init__(self, plan: Plan) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.plan = plan
        self.stream: Stream | None = None
        self.expected: tuple[Tensor, Tensor] | None = None

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing is allocated before the first attention call."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """The new keys and values alone, which wait for their attention call; the rest is in the stream."""
        if self.expected is not None:
            raise ValueError(
                "past_key_values: the attention of this model did not ask fewkeys for the last tokens; use the cache "
                "with the model it was made for, and make another after changing the attention implementation"
            )
        self.expected = (key_states, value_states)
        streams.wait(key_states, self)
        return key_states, value_states

    def attend(self, inputs: AttentionInputs) -> Tensor:
        """Take in the expected tokens and answer their queries."""
        self.expected = None
        if self.stream is None:
            self.stream = Stream(self.plan, scale=inputs.scale)
        self.stream.append(inputs.key, inputs.value, inputs.key_mask)
        return self.stream.attend(inputs.query)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Length and offset of the keys that `update` returns."""
        return Length(query_length), self.get_seq_length()

    def get_seq_length(self) -> int:
        """All tokens seen, whatever is left of them."""
        return 0 if self.stream is None else self.stream.length

    def get_max_length(self) -> int:
        """No maximum."""
        return -1

    get_max_cache_shape = get_max_length  # the name in earlier versions

    def reset(self) -> None:
        """Forget everything."""
        self.stream = self.expected = None

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Reorder the sequences for beam search."""
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep these sequences."""
        if self.stream is not None:
            self.stream.select(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every sequence."""
        if self.stream is not None and self.stream.batch is not None:
            self.stream.select(torch.arange(self.stream.batch).repeat_interleave(repeats))

    def crop(self, tokens_to_remove: int) -> None:
        """Take back the newest `-tokens_to_remove` tokens; `ValueError` where they are summarised already."""
        if tokens_to_remove > 0:
            raise ValueError(f"tokens_to_remove: expected zero or less, got {tokens_to_remove}")
        if self.stream is not None:
            self.stream.crop(self.stream.length + tokens_to_remove)

    def offload(self) -> None:
        """Streams stay where they are: they are small."""

    def prefetch(self) -> None:
        """Streams stay where they are."""


class StreamCache(Cache):
    """One stream per layer; made by `fewkeys.cache`."""

    def __init__(self, model: PreTrainedModel, plans: Sequence[Plan]) -> None:
        self._own = [StreamLayer(plan) for plan in plans]
        super().__init__(layers=[*self._own])
        self._model = weakref.ref(model)
        self._attached = weakref.finalize(self, interface.attach(model, None).detach)

    def close(self) -> None:
        """Give the model its own attention back; the cache is of no more use."""
        self._attached()

    def memory(self) -> int:
        """Bytes held by all layers."""
        return sum(own.stream.memory() for own in self._own if own.stream is not None)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write everything held to one safetensors file, whole or not at all."""
        files.write_all(path, [None if own.stream is None else own.stream.contents() for own in self._own])

    def load(self, path: str | os.PathLike[str]) -> None:
        """Go on from what `save` wrote under the same plans; `ValueError` for another or a damaged file, which changes
        nothing. Everything in it is checked before it is used.
        """
        model = self._model()
        device = "cpu" if model is None else model.device
        try:
            held = files.read_all(path)
            streams = [None if own is None else Stream.of(*own, device) for own in held]
            plans = [own.plan for own in self._own]
            if len(streams) != len(plans) or any(
                one is not None and one.plan != plan for one, plan in zip(streams, plans, strict=False)
            ):
                raise ValueError(f"expected the {len(plans)} layers of this cache with their plans, got others")
        except files.FAULTS as error:
            raise ValueError(f"path: expected a file that a cache's save wrote, got {path} ({error})") from None
        for own, one in zip(self._own, streams, strict=True):
            own.stream, own.expected = one, None

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
