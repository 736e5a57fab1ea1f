"""The transformers side of `fewkeys.cache`: imported only where transformers is installed."""

from __future__ import annotations

import copy
import os
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, CacheLayerMixin
from transformers.configuration_utils import PreTrainedConfig

from fewkeys.captures.capture import AttentionInputs
from fewkeys.integrations import interface, streams
from fewkeys.integrations.families import NAME
from fewkeys.integrations.streams import Length
from fewkeys.integrations.terms import plain
from fewkeys.plan import Plan
from fewkeys.streaming import files
from fewkeys.streaming.by_head import HeadStreams
from fewkeys.tree.leaves import Held


class StreamLayer(CacheLayerMixin):
    """One layer of a `StreamCache`: the streams of its key heads."""

    is_sliding = False
    is_croppable = True
    supports_early_init = False

    def __init__(self, plans: Sequence[Plan], how: Held, config: PreTrainedConfig, before: StreamLayer | None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.plans = plans
        self.streams = HeadStreams(plans, how)
        self.expected: tuple[Tensor, Tensor] | None = None
        self.closed = False
        self._config, self._before = weakref.ref(config), before

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing is allocated before the first attention call."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """The new keys and values alone, which wait for their attention call; the rest is in the stream."""
        config = self._config()
        if self.closed or config is None or config._attn_implementation != NAME:
            raise ValueError(
                "past_key_values: expected a cache that is open, of a model whose attention runs through fewkeys, got "
                "one that was closed, or whose model had its attention implementation set since; make another"
            )
        if self.expected is not None or (self._before is not None and self._before.expected is not None):
            raise ValueError(
                "past_key_values: the attention of this model did not ask fewkeys for the last tokens; use the cache "
                "with the model it was made for"
            )
        self.expected = (key_states, value_states)
        streams.wait(key_states, self)
        return key_states, value_states

    def attend(self, inputs: AttentionInputs) -> Tensor:
        """Take in the expected tokens and answer their queries."""
        self.expected = None
        if not plain(inputs):
            raise ValueError(
                "model: its attention has capped scores, learned sinks or a bias of distances, which no stream knows; "
                "use fewkeys.apply and the model's own cache"
            )
        self.streams.append(inputs.key, inputs.value, inputs.key_mask, inputs.scale)
        return self.streams.attend(inputs.query)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Length and offset of the keys that `update` returns."""
        return Length(query_length), self.get_seq_length()

    def get_seq_length(self) -> int:
        """All tokens seen, whatever is left of them."""
        return self.streams.length

    def get_max_length(self) -> int:
        """No maximum."""
        return -1

    get_max_cache_shape = get_max_length  # the name in earlier versions

    def reset(self) -> None:
        """Forget everything."""
        self.streams, self.expected = HeadStreams(self.plans, self.streams.how), None

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Reorder the sequences for beam search."""
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep these sequences."""
        self.streams.select(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every sequence."""
        if self.streams.batch is not None:
            self.streams.select(torch.arange(self.streams.batch, device="cpu").repeat_interleave(repeats))

    def crop(self, tokens_to_remove: int) -> None:
        """Take back the newest `-tokens_to_remove` tokens; `ValueError` where they are summarised already."""
        self.check_crop(tokens_to_remove)
        self.streams.crop(self.streams.length + tokens_to_remove)

    def check_crop(self, tokens_to_remove: int) -> None:
        """Raise what `crop` would raise, and take nothing back."""
        if tokens_to_remove > 0:
            raise ValueError(f"tokens_to_remove: expected zero or less, got {tokens_to_remove}")
        self.streams.check_crop(self.streams.length + tokens_to_remove)

    def offload(self) -> None:
        """Streams stay where they are."""

    def prefetch(self) -> None:
        """Streams stay where they are."""


class StreamCache(Cache):
    """One stream per layer; made by `fewkeys.cache`."""

    def __init__(self, model: PreTrainedModel, plans: Sequence[Sequence[Plan]], how: Held) -> None:
        self._how = how
        modules: list[Any] = [*interface.attention_modules(model)]
        self._own: list[StreamLayer] = []
        for own, module in zip(plans, modules, strict=True):
            config = getattr(module, "config", model.config)
            self._own.append(StreamLayer(own, how, config, self._own[-1] if self._own else None))
        super().__init__(layers=[*self._own])
        self._model = weakref.ref(model)
        hook = model.register_forward_pre_hook(_refuse_every_token_again, with_kwargs=True)
        self._attached = weakref.finalize(self, _leave, interface.attach(model, None), hook)

    def close(self) -> None:
        """Give the model its own attention back; the cache is of no more use."""
        for own in self._own:
            own.closed = True
        self._attached()

    def crop(self, tokens_to_remove: int) -> None:
        """Take back the newest `-tokens_to_remove` tokens of all layers, or, with a `ValueError`, of none."""
        for own in self._own:
            own.check_crop(tokens_to_remove)
        super().crop(tokens_to_remove)

    def memory(self) -> int:
        """Bytes of memory held by all layers; files are not counted."""
        return sum(own.streams.memory() for own in self._own)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write everything held to one safetensors file, whole or not at all."""
        files.write_all(path, [part for own in self._own for part in own.streams.contents()])

    def load(self, path: str | os.PathLike[str]) -> None:
        """Go on from what `save` wrote under the same plans; `ValueError` for another or a damaged file, which changes
        nothing. Everything in it is checked before it is used.
        """
        model = self._model()
        device = "cpu" if model is None else model.device
        counts = [len(own.streams.streams) for own in self._own]
        try:
            held = files.read_all(path)
            if len(held) != sum(counts):
                raise ValueError(f"expected {sum(counts)} streams, got {len(held)}")
            parts = [held[sum(counts[:layer]) :][:count] for layer, count in enumerate(counts)]
            found = [own.streams.restored(part, device) for own, part in zip(self._own, parts, strict=True)]
        except files.FAULTS as error:
            raise ValueError(
                f"path: expected a file that a cache's save wrote, of the {len(counts)} layers of this cache with "
                f"their plans, got {path} ({error})"
            ) from None
        for own, held_now in zip(self._own, found, strict=True):
            own.streams, own.expected = held_now, None

    def __deepcopy__(self, memo: dict[int, Any]) -> StreamCache:
        model = self._model()
        if model is None:
            raise ValueError(
                "past_key_values: expected a cache whose model is still there, got one whose model is gone"
            )
        found = StreamCache(model, [own.plans for own in self._own], self._how)
        for new, own in zip(found._own, self._own, strict=True):
            new.streams = copy.deepcopy(own.streams, memo)
        return found


def _refuse_every_token_again(module: nn.Module, args: Any, kwargs: dict[str, Any] | None = None) -> None:
    """`generate` without `use_cache` gives a model the cache and, at every step, all tokens: they would count twice."""
    if kwargs is None:  # a call of another thread, while torch is taking the hook in: it is not ours
        return
    if kwargs.get("use_cache") is False and isinstance(kwargs.get("past_key_values"), StreamCache):
        raise ValueError(
            "use_cache: expected True with a cache of fewkeys, which takes every token once, got False (perhaps from "
            "the model's configuration); pass use_cache=True"
        )


def _leave(attachment: interface.Attachment, hook: RemovableHandle) -> None:
    attachment.detach()
    hook.remove()
