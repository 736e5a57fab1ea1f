"""A cache for `model.generate` that keeps what a causal plan keeps: constant memory per layer, whatever the length.

    model.generate(**inputs, past_key_values=fewkeys.cache(model, fewkeys.budget(256, is_causal=True)))

transformers asks the cache for the keys of a layer and hands them to the attention function. This cache gives back the
new keys alone and leaves them waiting in `streams`; the attention function finds them there and lets the layer's
stream answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from fewkeys.integrations import interface
from fewkeys.integrations.patterns import SLIDING
from fewkeys.plan import Plan
from fewkeys.select import Window
from fewkeys.streaming import Stream

if TYPE_CHECKING:
    from transformers import Cache, PreTrainedModel


def cache(model: PreTrainedModel, plan: Plan | Sequence[Plan]) -> Cache:
    """An empty cache, and the attention of `model` that knows how to use it.

    Args:
        model: a decoder-only transformers model. As long as the cache lives (or until `close()`), the model's
            attention runs through fewkeys: calls with this cache by the plan, all others exactly.
        plan: for every layer, or one for each: what a stream can run, such as `fewkeys.budget(slots, is_causal=True)`;
            see `fewkeys.stream`. Layers whose own attention is a sliding window keep exactly that window.

    Returns:
        A transformers `Cache` for `past_key_values=`. It counts all tokens seen, so positions are right, and takes
        left-padded batches, grouped queries, chunks, several turns, beam search (reordering) and repeated or selected
        sequences. `crop` can take back the newest tokens, up to the last block, and says so where it cannot. `memory()`
        are its bytes, `copy.deepcopy` forks it, `save(path)` and `load(path)` let a conversation go on later.

    Raises:
        TypeError, ValueError: a model whose attention cannot be replaced, whose layers are not all attention with a
        cache of their own, or a plan that no stream can run.
    """
    interface.need_transformers()
    from fewkeys.integrations.stream_cache import StreamCache

    if not all(getattr(module, "is_causal", True) for module in interface.attention_modules(model)):
        raise ValueError(
            f"model: expected a decoder-only model, got {type(model).__name__}, whose queries see the future"
        )
    config = model.config.get_text_config(decoder=True)
    return StreamCache(model, _layers(config, plan))


def _layers(config: Any, plan: Plan | Sequence[Plan]) -> list[Plan]:
    """The plan of every layer."""
    count = config.num_hidden_layers
    plans = [plan] * count if isinstance(plan, Plan) else list(plan)
    if len(plans) != count:
        raise ValueError(f"plan: expected one plan, or one for each of {count} layers, got {len(plans)}")
    if getattr(config, "is_encoder_decoder", False) or getattr(config, "kv_sharing_modes", None) is not None:
        raise ValueError("model: expected a decoder-only model whose layers have keys of their own")
    kinds = getattr(config, "layer_types", None)
    window = getattr(config, "sliding_window", None)
    if kinds is None:
        kinds = ["full_attention" if window is None else SLIDING[0]] * count
    for layer, kind in enumerate(kinds):
        if kind in SLIDING and window is not None:
            plans[layer] = Plan(Window(window))
        elif kind != "full_attention":
            raise ValueError(f"model: expected layers of full or sliding attention, got {kind!r} in layer {layer}")
    for one in plans:
        Stream(one)
    return plans
