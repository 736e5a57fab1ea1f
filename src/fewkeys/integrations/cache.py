"""A cache for `model.generate` under a causal plan: constant memory, or all keys with their codes.

transformers passes the keys that a cache returns to the attention function. This cache returns only the new ones; the
attention function finds the stream of the others in `answers.streams`.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any

from torch import nn

from fewkeys.integrations import interface
from fewkeys.integrations.masks import SLIDING
from fewkeys.integrations.transformers import LayerPlan, plans_per_layer
from fewkeys.memory.rows import LeafType, check_leaves
from fewkeys.plan import Plan

if TYPE_CHECKING:
    from transformers import Cache, PreTrainedModel


def cache(model: PreTrainedModel, plan: Plan | Sequence[LayerPlan], *, leaves: LeafType | None = None) -> Cache:
    """An empty cache for `model`, whose attention is switched to use it.

        model.generate(**inputs, past_key_values=fewkeys.cache(model, fewkeys.budget(256, is_causal=True)))

    Args:
        model: a decoder-only transformers model. The plan answers only calls with this cache, until the cache is closed
            or deleted.
        plan: as in `fewkeys.apply`; one that `fewkeys.stream` can run, such as `fewkeys.budget(slots, is_causal=True)`.
        leaves: how layers of a `KeyScan` hold keys and values, as in `fewkeys.stream`: "int8", the default, or "model".

    Returns:
        A transformers `Cache` for `past_key_values=`, with left-padded batches, grouped queries, chunks, several turns,
        beam search, assisted and prompt-lookup decoding. `crop` can go back to 24 tokens before the most that the cache
        has held, to the beginning of a block, and to none; otherwise it raises. `memory()` is the number of its bytes,
        `copy.deepcopy` forks it, `save(path)` and `load(path)` continue a conversation later. No gradients.

    Raises:
        TypeError, ValueError: a model whose attention cannot be replaced, whose layers are not all attention with a
        cache of their own, or a plan that no stream can run.
    """
    model = interface.unwrapped(model)
    modules = interface.attention_modules(model)
    from fewkeys.integrations.stream_cache import StreamCache

    _check_layers(model, modules)
    plans = plans_per_layer(plan, modules)
    check_leaves(leaves, chain(*plans))
    return StreamCache(model, plans, leaves or "int8")


def _check_layers(model: PreTrainedModel, modules: Sequence[nn.Module]) -> None:
    config: Any = model.config.get_text_config(decoder=True)
    layers, kinds = getattr(config, "num_hidden_layers", 0), getattr(config, "layer_types", None) or ()
    crossed = any(layer < layers for layer in getattr(config, "cross_attention_layers", None) or ())
    is_shared = getattr(config, "kv_sharing_modes", None) is not None
    has_others = crossed or is_shared or not {"full_attention", *SLIDING}.issuperset(kinds)
    is_decoder = all(map(interface.is_causal, modules)) and not getattr(config, "is_encoder_decoder", False)
    if not is_decoder or has_others or len(modules) != layers:
        raise ValueError(
            "model: expected a decoder-only model whose every layer has keys of its own and attends to all tokens "
            f"before or to a window of them, got {type(model).__name__}; use fewkeys.apply and the model's own cache"
        )
