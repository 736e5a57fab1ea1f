"""The mask that a model builds by our mask function, and what the attention function reads from it.

Nothing of size n x n is built. A mask says which keys are real and which pattern the model asked for:

    (B, Nk)         causal
    (B, 1, 1, Nk)   every query sees every key

True and False, or, where the layer sees a window only, its size at real keys and 0 at others. There is always a mask:
without one, the flag of the attention module (`is_causal`) would have to say whether the call is causal, and it is
wrong in models that were only ever run by "eager". Where every key is real, the mask is one number, expanded.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from fewkeys.integrations import streams
from fewkeys.integrations.patterns import Pattern, pattern_of

if TYPE_CHECKING:
    from transformers.configuration_utils import PreTrainedConfig

LOWEST = -1e4
"""Numbers that models add to the scores of padding are at most this."""


class Keys(NamedTuple):
    """What a mask says of the keys: those that are real, (B, Nk), None: all; and the pattern, None: it does not say."""

    real: Tensor | None
    pattern: Pattern | None


def key_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] | None = None,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    config: PreTrainedConfig | None = None,
    device: torch.device | None = None,
    **_: Any,
) -> Tensor:
    """What a mask function of transformers is given, in short. `ValueError` for patterns that are not honoured."""
    pattern = pattern_of(mask_function, local_size, kv_offset + kv_length, config)
    if pattern.causal and int(q_offset) + q_length != kv_offset + kv_length:
        raise ValueError(
            f"past_key_values: expected a cache that holds the seen tokens only, got {kv_length} slots for "
            f"{int(q_offset) + q_length} tokens; use DynamicCache instead of a static or preallocated cache"
        )
    size, dtype = (1, torch.bool) if pattern.window is None else (pattern.window, torch.int32)
    mask = torch.full((), size, dtype=dtype, device=device).expand(batch_size, kv_length)
    if attention_mask is not None:
        real = attention_mask[:, kv_offset : kv_offset + kv_length].bool()
        if real.shape[1] < kv_length:
            if isinstance(kv_length, streams.Length):
                raise ValueError(
                    f"attention_mask: expected one over all {kv_offset + kv_length} tokens so far, those in the cache "
                    f"and the new ones, got one of {attention_mask.shape[1]}; put ones for the tokens in the cache "
                    "before it"
                )
            real = nn.functional.pad(real, (0, kv_length - real.shape[1]))
        if not bool(real.all()):
            mask = mask * real
    return mask if pattern.causal else mask[:, None, None, :]


def read_mask(module: nn.Module, mask: Tensor | None, shape: tuple[int, int]) -> Keys:
    """What the mask of a call says; `shape`: (B, Nk). `ValueError` for masks that are not honoured."""
    if mask is None:
        return Keys(None, None)
    by_key = mask.shape in ((shape[0], 1, 1, shape[1]), (1, 1, 1, shape[1]))
    if by_key and mask.is_floating_point() and bool(((mask == 0) | (mask <= LOWEST)).all()):
        mask = mask == 0
    if mask.is_floating_point():
        raise ValueError(
            f"attention_mask: {type(module).__name__} adds numbers of its own to the scores, {tuple(mask.shape)}, such "
            "as a bias for the distance in an image, and no plan can know them; use a model without (ViT, DINOv2)"
        )
    if mask.dtype not in (torch.bool, torch.int32) or not (by_key or mask.shape == shape):
        raise ValueError(
            f"attention_mask: expected padding of shape {shape}, got {mask.dtype} of shape {tuple(mask.shape)}; "
            "pass the two-dimensional attention_mask of the tokenizer, not one prepared for each query"
        )
    rows = mask[:, 0, 0].expand(shape) if by_key else mask
    window = None if mask.dtype == torch.bool else int(rows.max()) or None
    is_whole = rows.shape[1] > 1 and rows.stride(1) == 0
    return Keys(None if is_whole else rows.bool(), Pattern(not by_key, window))
