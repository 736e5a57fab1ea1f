"""The options of a model's attention beside queries, keys and values: which are honoured, and which are refused.

Honoured: causal and bidirectional attention, padding, and windows that a layer has of its own.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import nn

from fewkeys.integrations import packed

if TYPE_CHECKING:
    from transformers.configuration_utils import PreTrainedConfig

SLIDING = ("sliding_attention", "hybrid_sliding")
"""What configurations call layers that see a window."""

_INERT = {
    "cache_position",
    "encoder_attention_mask",
    "encoder_hidden_states",
    "labels",
    "logits_to_keep",
    "num_items_in_batch",
    "output_hidden_states",
    "output_router_logits",
    "past_key_values",
    "position_embeddings",
    "position_ids",
    "return_dict",
    "s_aux",
    "sliding_window",
    "softcap",
    "token_type_ids",
    "tokenizer",
    "use_cache",
}
"""Arguments that models hand down to their attention and that do not change its answer, or are read elsewhere."""


class Pattern(NamedTuple):
    """Which keys a query sees, beside padding.

    `window`: how many keys around the query (causal: up to it), as `fewkeys.Window` counts them; None: all.
    """

    causal: bool
    window: int | None


def pattern_of(
    function: Callable[..., Any] | None,
    local_size: int | None,
    reach: int,
    config: PreTrainedConfig | None,
) -> Pattern:
    """The pattern of a mask function of transformers, recognised by its parts; `ValueError` for all others.

    reach: keys up to the last one.
    """
    from transformers.masking_utils import bidirectional_mask_function, causal_mask_function

    if function is causal_mask_function:
        return Pattern(True, None)
    if function is bidirectional_mask_function:
        return Pattern(False, None)
    name, parts = _made_of(function)
    if local_size is not None and name == "and_masks":
        if parts[0] == "sliding_window_overlay":
            return Pattern(True, local_size)
        if parts[0] == "sliding_window_bidirectional_overlay":
            return Pattern(False, 2 * local_size + 1)
        if parts[0] == "chunked_overlay":
            if reach <= local_size:
                return Pattern(True, None)
            raise ValueError(
                f"attention_chunk_size: this model cuts its sequences into chunks of {local_size} tokens, which is not "
                f"supported, got {reach} tokens; use sequences of at most {local_size}"
            )
    if name == "or_masks" and parts[1] != "blockwise_overlay" and getattr(config, "use_bidirectional_attention", False):
        return Pattern(False, None if local_size is None else 2 * local_size - 1)
    raise ValueError(
        "attention_mask: expected causal or bidirectional attention with padding, or a window, got another pattern "
        "(packed causal sequences, blocks, or a compiled cache); give each sequence its own row and pad by "
        "attention_mask (of a SentenceTransformer: encoder[0].unpad_inputs = False)"
    )


def _made_of(function: Callable[..., Any] | None) -> tuple[str, list[str]]:
    """The names of what made a combined mask function, and of what made its parts."""
    if not inspect.isfunction(function):
        return "", []
    inner = inspect.getclosurevars(function).nonlocals.get("mask_functions", ())
    return _maker(function), [_maker(part) for part in inner]


def _maker(function: Callable[..., Any]) -> str:
    return str(function.__qualname__).partition(".")[0]


def span(window: int, causal: bool) -> tuple[int, int]:
    """How many keys before and after its own place a query sees in a window."""
    return (window - 1, 0) if causal else (window // 2, (window - 1) // 2)


def layer_window(module: nn.Module) -> int | None:
    """The window of an attention module's own, as its configuration counts it; None: it sees every key.

    Moshi's configuration has a window that its model never asks for.
    """
    attributes = vars(module)
    kinds, window = layer_kinds(getattr(module, "config", None))
    layer = attributes.get("layer_idx", attributes.get("layer_id"))
    if kinds is not None and layer is not None and kinds[layer] not in SLIDING:
        return None
    if "sliding_window" in attributes:
        window = attributes["sliding_window"]
    elif kinds is None and not any("sliding" in name for name in vars(sys.modules[type(module).__module__])):
        return None
    return window if isinstance(window, int) else None


def layer_kinds(config: Any) -> tuple[Sequence[str] | None, Any]:
    """By layer, the kind of attention, None where all are of one; and the window of those that have one, if any."""
    named = getattr(config, "attention_layers", None)
    if named is not None:  # GPT-Neo's words
        return [SLIDING[0] if kind == "local" else "full_attention" for kind in named], config.window_size
    return getattr(config, "layer_types", None), getattr(config, "sliding_window", None)


def check_honoured(module: nn.Module, dropout: float, kwargs: dict[str, Any]) -> None:
    """Raise `ValueError` for every option of the model that is not honoured."""
    if dropout:
        raise ValueError(
            f"dropout: expected 0, got {dropout}; call model.eval(), or configure the model with no attention dropout"
        )
    ignored = _INERT if kwargs.get("cu_seq_lens_q") is None else _INERT | packed.NAMES
    for name, value in kwargs.items():
        if name not in ignored and value is not None and value is not False:
            raise ValueError(
                f"{name}: {type(module).__name__} passes this argument to its attention, which fewkeys "
                "does not support; use a model or a call without it"
            )
