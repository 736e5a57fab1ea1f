"""The transformers side of `fewkeys.cache`."""

from __future__ import annotations

import copy
import os
import weakref
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, CacheLayerMixin

from fewkeys.captures.capture import AttentionInputs
from fewkeys.core.gaps import has_interior_padding
from fewkeys.integrations import interface
from fewkeys.integrations.answers import Length, streams
from fewkeys.integrations.masks import layer_window
from fewkeys.integrations.terms import gaps_error, plain
from fewkeys.memory import Stream, files
from fewkeys.memory.rows import LeafType
from fewkeys.plan import Plan
from fewkeys.select import Window

DRAFT = 24
"""Tokens that `crop` can always remove: more than assisted and prompt-lookup decoding propose by default."""


class StreamLayer(CacheLayerMixin):
    """One layer of a `StreamCache`.

    plans: one for all key heads, or one for each. `calls`: a stream for each attention call with the same keys
    (DiffLlama makes two). `answered`: how many of these calls have been made for the newest keys.
    """

    is_sliding = False
    is_croppable = True
    supports_early_init = False

    def __init__(self, plans: Sequence[Plan], window: int | None, leaves: LeafType) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.plans = plans if window is None else (Plan(Window(window)),)
        self.window, self.leaves = window, leaves
        self.calls = [self.new_stream()]
        self._length, self.answered = 0, 1

    def new_stream(self) -> Stream:
        return Stream(self.plans, leaves=self.leaves if any(plan.scanned for plan in self.plans) else None, undo=DRAFT)

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Leave allocation to the first attention call."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """The new keys and values alone."""
        self._length, self.answered = self.get_seq_length(), 0
        streams[key_states] = self.attend
        return key_states, value_states

    def attend(self, inputs: AttentionInputs) -> Tensor:
        """Append the tokens to a stream and return the outputs of their queries."""
        if not plain(inputs) or inputs.window != self.window:
            has = "capped scores, learned sinks, a distance bias, or a window other than in its configuration"
            raise ValueError(f"model: its attention has {has}, which no stream supports; use fewkeys.apply")
        if self.answered == len(self.calls):
            self.calls.append(self.new_stream())
        stream = self.calls[self.answered]
        if stream.length != self._length:
            raise ValueError("past_key_values: expected as many attention calls of a layer as for the tokens before")
        if self.window is not None and (inputs.key_mask is not None or stream.is_padded):
            every = torch.ones_like(inputs.key[:, 0, :, 0], dtype=torch.bool)
            real = every if inputs.key_mask is None else inputs.key_mask
            if has_interior_padding(torch.cat([stream.key_mask(), real], 1) if stream.length else real):
                raise gaps_error(self.window)
        self.answered += 1
        stream.scale = inputs.scale
        return stream.answer(inputs.query, inputs.key, inputs.value, inputs.key_mask)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        length, stream = Length(query_length), self.calls[0]
        length.held = stream.key_mask
        return length, stream.length

    def get_seq_length(self) -> int:
        return self.calls[0].length

    def get_max_length(self) -> int:
        return -1

    get_max_cache_shape = get_max_length  # the name in earlier versions

    def reset(self) -> None:
        self.calls, self.answered = [self.new_stream()], 1

    def batch_select_indices(self, indices: Tensor) -> None:
        for stream in self.calls:
            stream.select(indices)

    reorder_cache = batch_select_indices  # type: ignore[assignment]

    def batch_repeat_interleave(self, repeats: int) -> None:
        batch = self.calls[0].batch
        if batch is not None:
            self.batch_select_indices(torch.arange(batch, device="cpu").repeat_interleave(repeats))


class StreamCache(Cache):
    """One stream per layer; made by `fewkeys.cache`."""

    layers: list[StreamLayer]  # type: ignore[assignment]

    def __init__(self, model: PreTrainedModel, plans: Sequence[Sequence[Plan]], leaves: LeafType) -> None:
        layers = [
            StreamLayer(layer_plans, layer_window(module), leaves)
            for layer_plans, module in zip(plans, interface.attention_modules(model), strict=True)
        ]
        super().__init__(layers=[*layers])
        self._model, self._kind = model, f"cache of {len(layers)} layers"
        leave = ExitStack()
        leave.callback(model.register_forward_pre_hook(_refuse_every_token_again, with_kwargs=True).remove)
        leave.callback(interface.attach(model, None).detach)
        self._attached = weakref.finalize(self, leave.close)

    @property
    def _streams(self) -> list[Stream]:
        return [stream for layer in self.layers for stream in layer.calls]

    def close(self) -> None:
        """Restore the model's own attention; the cache cannot be used any more."""
        self._attached()

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        self._check_lengths()
        return super().get_mask_sizes(query_length, layer_idx)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        if layer_idx == 0:  # of a model that has made no mask
            self._check_lengths()
        if not self._attached.alive or not self.layers[layer_idx - 1].answered:
            got = "a closed one, or attention without fewkeys for the last tokens"
            raise ValueError(f"past_key_values: expected an open cache of this model, got {got}; make another")
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)

    def _check_lengths(self) -> None:
        """Raise `ValueError` where an earlier call stopped between two layers."""
        lengths = {stream.length for stream in self._streams}
        if len(lengths) > 1:
            got = f"{sorted(lengths)} tokens, as a call before did not reach its end"
            raise ValueError(
                f"past_key_values: expected the same tokens in all layers, got {got}; crop(0) removes them"
            )

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the newest `-tokens_to_remove` tokens that all layers have, and those that only some have.

        If any stream cannot, none does: `ValueError`.
        """
        seen = min(stream.length for stream in self._streams)
        if not isinstance(tokens_to_remove, int) or not -seen <= tokens_to_remove <= 0:
            raise ValueError(f"tokens_to_remove: expected -{seen} (all tokens so far) to 0, got {tokens_to_remove}")
        length = seen + tokens_to_remove
        for stream in self._streams:
            stream.check_crop(length, "tokens_to_remove")
        for layer in self.layers:
            layer.answered = 1
            for stream in layer.calls:
                stream.crop(length)

    def memory(self) -> int:
        return sum(stream.memory() for stream in self._streams)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the cache to one safetensors file, complete or not at all."""
        files.write(path, self._kind, [stream.contents() for stream in self._streams])

    def load(self, path: str | os.PathLike[str]) -> StreamCache:
        """Continue from a file that `save` wrote under the same plans. `ValueError` for others, without a change."""
        place, restored = "", list[list[Stream]]()
        try:
            contents = files.read(path, self._kind)
            size = len(contents) // len(self.layers)
            for number, layer in enumerate(self.layers):
                place, of_layer = f"layer {number}: ", contents[number * size : (number + 1) * size]
                restored.append([layer.new_stream().restore(*content, self._model.device) for content in of_layer])
        except files.FAULTS as error:
            raise ValueError(f"path: expected a file that a cache's save wrote, got {path}: {place}{error}") from None
        for layer, calls in zip(self.layers, restored, strict=True):
            layer.calls, layer.answered = calls, 1
        return self

    def __getstate__(self) -> None:
        raise TypeError("past_key_values: expected a cache that can be pickled, got one of fewkeys; use save(path)")

    def __deepcopy__(self, memo: dict[int, Any]) -> StreamCache:
        twin = StreamCache(self._model, [layer.plans for layer in self.layers], self.layers[0].leaves)
        for new, layer in zip(twin.layers, self.layers, strict=True):
            new.calls = copy.deepcopy(layer.calls, memo)
        return twin


def _refuse_every_token_again(module: nn.Module, args: Any, kwargs: dict[str, Any] | None = None) -> None:
    """Refuse a `generate` that passes tokens again: without `use_cache` always, with assistants in the first step."""
    if kwargs is None:  # another thread called the model while torch registered the hook
        return
    cache, places = kwargs.get("past_key_values"), kwargs.get("position_ids")
    if not isinstance(cache, StreamCache):
        return
    if kwargs.get("use_cache") is False:
        raise ValueError("use_cache: expected True with a cache of fewkeys, got False; pass use_cache=True")
    begins_again = cache.get_seq_length() > 0 and isinstance(places, Tensor) and not bool(places[..., 0].any())
    if begins_again and bool(cache.layers[0].calls[0].key_mask().any()):
        fix = "prompt_lookup_num_tokens and assistant_model, which pass all tokens again, need an empty cache"
        raise ValueError(f"position_ids: expected places after those of the tokens in the cache, got the first; {fix}")
