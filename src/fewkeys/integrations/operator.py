"""Attention of a model as one operator of `torch.compile`, so that the graph of an encoder does not break at it.

The graph knows an attention module by its `id`. Which plan is in force is asked when the operator runs, so one
graph serves every plan. Calls that need more than an operator has (gradients, causal calls, caches, terms of scores)
break the graph instead.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from fewkeys.core.precision import autocast_is_on
from fewkeys.integrations.answers import attached, plan_stack
from fewkeys.integrations.masks import key_mask

Attend = Callable[..., tuple[Tensor, Tensor | None]]


def is_padding(
    kv_length: int,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] | None = None,
    attention_mask: Tensor | None = None,
    **_: Any,
) -> bool:
    """Whether a mask that a model asks for is one of padding alone: a mask of the operator, by `padding`."""
    from transformers.masking_utils import bidirectional_mask_function

    is_whole = attention_mask is None or (attention_mask.ndim == 2 and attention_mask.shape[1] == kv_length)
    return mask_function is bidirectional_mask_function and kv_offset == 0 and is_whole


def padding(
    batch_size: int,
    kv_length: int,
    attention_mask: Tensor | None = None,
    device: torch.device | None = None,
    **_: Any,
) -> Tensor:
    """The mask (B, 1, 1, Nk) of a compiled encoder, True at real keys."""
    if attention_mask is None:
        return torch.ones(batch_size, 1, 1, kv_length, dtype=torch.bool, device=device)
    return attention_mask[:, None, None, :].bool()


def suits(module: nn.Module, mask: Tensor | None, options: dict[str, Any]) -> bool:
    """Whether the operator can answer a call, as far as compiled code knows it."""
    others = [value for name, value in options.items() if name not in ("is_causal", "scaling")]
    is_causal = options.get("is_causal")
    is_causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    if is_causal or any(isinstance(value, Tensor) or value for value in others):
        return False
    is_of_keys = mask is None or (mask.ndim == 4 and mask.shape[1:3] == (1, 1) and mask.dtype == torch.bool)
    is_known = is_of_keys and plan_stack(module).owner == id(module)
    return is_known and not (torch.is_grad_enabled() or autocast_is_on())


@cache
def register(attend: Attend) -> None:
    """Define `fewkeys::attention`, which calls `attend` as transformers calls an attention function."""

    @torch.library.custom_op("fewkeys::attention", mutates_args=())
    def operator(
        query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float | None, module: int
    ) -> Tensor:
        if mask is not None:
            from transformers.masking_utils import bidirectional_mask_function

            shape, real = (query.shape[0], query.shape[2], key.shape[2]), mask[:, 0, 0]
            mask = key_mask(*shape, mask_function=bidirectional_mask_function, attention_mask=real)
        return attend(attached[module], query, key, value, mask, scaling=scale, is_causal=False)[0]

    @operator.register_fake
    def _(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float | None, module: int) -> Tensor:
        batch, heads, queries, _ = query.shape
        return query.new_empty(batch, queries, heads, value.shape[-1])
