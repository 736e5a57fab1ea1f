"""The mask that our mask function makes for a model, and how the attention function reads it.

Nothing of size n x n is built. The shape of a mask is the pattern that the model requested:

    (B, Nk)         causal
    (B, 1, 1, Nk)   every query sees every key

Its entries are True at real keys and False at padding; in a layer with a window, the window's size and its negative.
Where every key is real, the mask is one number, expanded. There is always a mask, since without one only the module's
flag `is_causal` would say whether the call is causal, and the flag is wrong in some models.
"""

import inspect
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from fewkeys.integrations.answers import Length

DTYPES = (torch.bool, torch.int32)
"""Of the entries of a mask, without and with a window."""
LOWEST = -1e4
"""Models add at most this number to the scores of padding."""
SLIDING = ("sliding_attention", "hybrid_sliding")
"""What configurations call layers with a window."""


class Keys(NamedTuple):
    """A mask's content. real: (B, Nk), None: all keys. window: None: every key."""

    real: Tensor | None
    is_causal: bool
    window: int | None

    def seen(self, queries: int, key: Tensor) -> Tensor:
        """Which of the keys (B, H, Nk, D) each query sees, (B or 1, 1, Nq, Nk). Causal queries are the last ones."""
        keys = key.shape[2]
        if self.real is not None and not self.is_causal and self.window is None:
            return self.real[:, None, None, :].expand(-1, 1, queries, keys)
        offset, size = keys - queries if self.is_causal else 0, self.window or 2 * (queries + keys)
        first = offset - (size - 1 if self.is_causal else size // 2)
        seen = torch.ones(queries, keys, dtype=torch.bool, device=key.device).triu(first).tril(first + size - 1)
        return seen[None, None] if self.real is None else seen & self.real[:, None, None, :]


class KeyMask(Tensor):
    """A mask that models can move and slice.

    SDPA, and a module that adds the mask to its own scores, get the boolean mask (B, H, Nq, Nk) that this one stands
    for. Another computation with a causal mask or a window raises `ValueError`: no plan knows its result.
    """

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name, kwargs = getattr(func, "__name__", ""), kwargs or {}
        operation = name.strip("_")  # add_ and __add__ are "add"
        if name == "scaled_dot_product_attention":
            seen = _decoded(kwargs["attn_mask"]).seen(args[0].shape[2], args[1])
            return func(*args, **kwargs | {"attn_mask": seen})
        if operation in _ADDING and {getattr(arg, "ndim", 0) for arg in args} <= {2, 4}:
            mask, scores = args if isinstance(args[0], KeyMask) else args[::-1]
            seen = _decoded(mask).seen(scores.shape[2], scores.mT)
            return scores.masked_fill(~seen, torch.finfo(scores.dtype).min)
        if operation == "getitem" and args[0].ndim == 2 and _is_of_last_queries(args[1]):
            return args[0]
        if operation not in _COMPUTING:
            with suppress(IndexError):  # more axes than it has
                return super().__torch_function__(func, types, args, kwargs)  # type: ignore[no-untyped-call]
        elif all(arg.ndim == 4 and arg.dtype == torch.bool for arg in tree_leaves(args) if isinstance(arg, KeyMask)):
            with torch._C.DisableTorchFunctionSubclass():  # already the mask that SDPA takes
                return func(*args, **kwargs)
        got = f"one that computes with it ({name}), which no plan supports"
        raise ValueError(f"attention_mask: expected a model that passes its mask on unchanged, got {got}")


def _is_of_last_queries(index: Any) -> bool:
    """Whether an index takes the last queries of a mask (B, 1, Nq, Nk), as Gemma 4 does before its last layers."""
    match index:
        case (batch, heads, slice(start=start, stop=None), keys) if batch == heads == keys == slice(None):
            return (start or 0) <= 0
    return False


_ADDING = {"add", "radd", "iadd"}
_COMPUTING = _ADDING | {
    *("sub", "rsub", "mul", "rmul", "eq", "ne", "lt", "gt", "le", "ge", "and", "or", "invert", "logical_and"),
    *("logical_or", "logical_not", "bitwise_not", "bitwise_and", "where", "masked_fill", "cat", "concat", "pad"),
    *("float", "half", "bfloat16", "type_as"),
}


def key_mask(
    batch_size: int, q_length: int, kv_length: int, q_offset: int | Tensor = 0, kv_offset: int = 0, **options: Any
) -> Tensor:
    """Our mask, by the arguments of a mask function of transformers. `ValueError` for patterns it cannot express."""
    is_causal, window = _pattern(kv_offset + kv_length, **options)
    attention_mask: Tensor | None = options.get("attention_mask")
    if is_causal and int(q_offset) + q_length != kv_offset + kv_length:
        got = f"{kv_length} slots for {int(q_offset) + q_length} tokens"
        raise ValueError(f"past_key_values: expected DynamicCache, no static or preallocated cache, got {got}")
    real = None
    if attention_mask is not None:
        real = attention_mask.as_subclass(Tensor)[:, kv_offset : kv_offset + kv_length].bool().contiguous()
        real = nn.functional.pad(real, (0, kv_length - real.shape[1]))
        real = None if bool(real.all()) else real
    if kv_offset and isinstance(kv_length, Length):
        _check_past(kv_length.held(), attention_mask, kv_offset + kv_length)
    mask = entries(real, window, (batch_size, kv_length), options.get("device"))
    may_skip = options.get("allow_is_causal_skip", True) if is_causal else options.get("allow_is_bidirectional_skip")
    mask = mask if may_skip else mask.contiguous()
    return (mask if is_causal else mask[:, None, None, :]).as_subclass(KeyMask)


def _check_past(held: Tensor, given: Tensor | None, tokens: int) -> None:
    """Raise `ValueError` for a mask of fewer tokens, or one that contradicts those of the calls before, `held`."""
    past = torch.ones_like(held) if given is None else given.as_subclass(Tensor)[:, : held.shape[1]].bool()
    is_short = given is not None and given.shape[1] < tokens
    if is_short or (len(past) == len(held) and not torch.equal(past.to(held.device), held)):  # a stream checks batches
        raise ValueError(
            f"attention_mask: expected one over all {tokens} tokens so far, in which the padding of the "
            f"{held.shape[1]} tokens in the cache is as it was; pass it, or fill another cache"
        )


def entries(real: Tensor | None, window: int | None, shape: tuple[int, int], device: torch.device | None) -> Tensor:
    """The entries (B, Nk) of a mask."""
    mask = torch.ones((), dtype=torch.bool, device=device) if real is None else real
    return (mask if window is None else torch.where(mask, window, -window).int()).expand(shape)


def _pattern(
    reach: int, mask_function: object = None, local_size: int | None = None, config: object = None, **_: Any
) -> tuple[bool, int | None]:
    """Whether a mask function of transformers is causal, and its window as `fewkeys.Window` counts it (None: all).

    Both follow from the names of the functions that made its parts. reach: keys up to the last one.
    """
    from transformers.masking_utils import bidirectional_mask_function, causal_mask_function

    if mask_function in (causal_mask_function, bidirectional_mask_function):
        return mask_function is causal_mask_function, None
    name, parts = "", list[str]()
    if inspect.isfunction(mask_function):
        inner = inspect.getclosurevars(mask_function).nonlocals.get("mask_functions", ())
        name, *parts = (part.__qualname__.partition(".")[0] for part in (mask_function, *inner))
    if local_size is not None and name == "and_masks":
        if parts[0] == "sliding_window_overlay":
            return True, local_size
        if parts[0] == "sliding_window_bidirectional_overlay":
            return False, 2 * local_size + 1
        if parts[0] == "chunked_overlay":
            if reach <= local_size:
                return True, None
            raise ValueError(f"attention_chunk_size: expected at most {local_size} tokens, one chunk, got {reach}")
    if name == "or_masks" and parts[1] != "blockwise_overlay" and getattr(config, "use_bidirectional_attention", False):
        return False, None if local_size is None else 2 * local_size - 1
    raise ValueError(
        "attention_mask: expected causal or bidirectional attention with padding, or a window, got another pattern "
        "(packed causal sequences, blocks, a compiled cache); give each sequence its own row (of a "
        "SentenceTransformer: encoder[0].unpad_inputs = False)"
    )


def read_mask(module: nn.Module, mask: Tensor, shape: tuple[int, int]) -> Keys:
    """The content of a call's mask; `shape`: (B, Nk). It is stored with a mask of ours, which all layers share."""
    stored: dict[tuple[int, int], Keys]
    stored = vars(mask).setdefault("_fewkeys_keys", {}) if isinstance(mask, KeyMask) else {}
    if shape not in stored:
        stored[shape] = _read(module, mask, shape)
    return stored[shape]


def _read(module: nn.Module, mask: Tensor, shape: tuple[int, int]) -> Keys:
    mask = mask.as_subclass(Tensor)
    if mask.is_floating_point():
        if not bool(((mask == 0) | (mask <= LOWEST)).all()):
            raise ValueError(f"attention_mask: {type(module).__name__} adds a bias to the scores, which no plan has")
        mask = mask == 0
    if mask.dtype not in DTYPES or mask.shape not in (shape, (shape[0], 1, 1, shape[1]), (1, 1, 1, shape[1])):
        got = f"{mask.dtype} of shape {tuple(mask.shape)}; pass the tokenizer's, not one prepared for each query"
        raise ValueError(f"attention_mask: expected padding of shape {shape}, got {got}")
    return _decoded(mask.expand(shape[0], *mask.shape[1:]))


def _decoded(mask: Tensor) -> Keys:
    mask = mask.as_subclass(Tensor)
    rows = mask if mask.ndim == 2 else mask[:, 0, 0]
    window, real = None if mask.dtype == torch.bool else int(rows.abs().max()), rows > 0
    # A decoded token has no strides that tell.
    is_whole = bool(real.all()) if rows.shape[1] == 1 else rows.shape[1] > 1 and rows.stride(1) == 0
    return Keys(None if is_whole else real, mask.ndim == 2, window)


def layer_window(module: nn.Module) -> int | None:
    """The window of an attention module, as its configuration counts it; None: it sees every key."""
    attributes, config = vars(module), getattr(module, "config", None)
    kinds, layer = getattr(config, "layer_types", None), attributes.get("layer_idx")
    if kinds is not None and layer is not None and kinds[layer] not in SLIDING:
        return None
    is_named = "sliding_window" in attributes or kinds is not None
    if not is_named and not any("sliding" in name for name in vars(sys.modules[type(module).__module__])):
        return None  # the configuration of Moshi has a window that its model never asks for
    window = attributes.get("sliding_window", getattr(config, "sliding_window", None))
    return window if isinstance(window, int) else None
