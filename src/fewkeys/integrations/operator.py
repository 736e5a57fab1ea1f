"""Attention of a model as one operator of `torch.compile`, so that the graph of an encoder does not break at it.

The graph knows an attention module by its `id`, and the operator looks up the plan in force, so one graph serves every
plan. Calls that need more (gradients, causal calls, caches, terms of scores) break the graph.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from fewkeys.core.precision import autocast_is_on
from fewkeys.integrations.answers import attached, plan_stack
from fewkeys.integrations.masks import DTYPES, KeyMask, entries

Output = tuple[Tensor, Tensor | None]
Attend = Callable[..., Output]

TYPES = frozenset(("bert", "camembert", "data2vec-text", "electra", "ernie", "modernbert", "roberta", "xlm-roberta"))
"""Model types that pass a mask on unchanged, as tests show: in compiled code no `KeyMask` watches over it."""


def mask_of_keys(batch_size: int, kv_length: int, config: Any = None, **options: Any) -> Tensor | None:
    """The mask (B, 1, 1, Nk) of an encoder, by the arguments of a mask function; None where the graph must break.

    Compiled code cannot look into the function of a window: it is transformers' own without `use_vmap`, and
    bidirectional with `allow_is_bidirectional_skip`.
    """
    from transformers.masking_utils import bidirectional_mask_function

    shape, window, attention_mask = (batch_size, kv_length), None, options.get("attention_mask")
    if config is None or config.model_type not in TYPES or _needs_break() or options.get("kv_offset"):
        return None
    if attention_mask is not None and attention_mask.shape != shape:
        return None
    if options.get("mask_function") is not bidirectional_mask_function:
        local_size = options.get("local_size")
        if local_size is None or options.get("allow_is_bidirectional_skip") is None or options.get("use_vmap"):
            return None
        window = 2 * local_size + 1
    real = None if attention_mask is None else attention_mask.bool()
    return entries(real, window, shape, options.get("device"))[:, None, None, :]


def _needs_break() -> bool:
    """Whether no call can be the operator's, which has no gradient and no casts."""
    return torch.is_grad_enabled() or autocast_is_on()


def _is_of_keys(mask: Tensor) -> bool:
    return not isinstance(mask, KeyMask) and mask.ndim == 4 and mask.shape[1:3] == (1, 1) and mask.dtype in DTYPES


def watched(mask: Tensor | None) -> Tensor | None:
    """A mask of `mask_of_keys` as a `KeyMask`; any other mask as it is."""
    if mask is None or not _is_of_keys(mask):
        return mask
    whole = mask[:1, ..., :1].expand(mask.shape)
    return (whole if bool((mask > 0).all()) else mask).as_subclass(KeyMask)


def suits(module: nn.Module, mask: Tensor | None, options: dict[str, Any]) -> bool:
    """Whether the operator can answer a call, as far as compiled code knows it."""
    if _needs_break() or plan_stack(module).owner != id(module) or not (mask is None or _is_of_keys(mask)):
        return False
    is_causal = options.get("is_causal")
    if getattr(module, "is_causal", True) if is_causal is None else is_causal:
        return False
    read = ("is_causal", "scaling", "sliding_window")
    return not any(isinstance(value, Tensor) or value for name, value in options.items() if name not in read)


@cache
def register(attend: Attend) -> None:
    """Define `fewkeys::attention`, which calls `attend` as transformers calls an attention function."""

    # The choice of keys reads numbers from the device, which a CUDA graph cannot record.
    @torch.library.custom_op("fewkeys::attention", mutates_args=(), tags=(torch.Tag.cudagraph_unsafe,))
    def operator(
        query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float | None, owner: int
    ) -> Tensor:
        module = attached.get(owner)
        if module is None:
            raise ValueError("model: expected the one that was compiled, in its own process; compile again")
        return attend(module, query, key, value, mask, scaling=scale, is_causal=False)[0]

    @operator.register_fake
    def _(query: Tensor, key: Tensor, value: Tensor, *unread: object) -> Tensor:
        if torch.compiler.is_exporting():
            raise ValueError("model: a graph of torch.export would outlive the plan; compile by torch.compile")
        batch, heads, queries, _ = query.shape
        return query.new_empty(batch, queries, heads, value.shape[-1])
