"""What a stream lets in."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fewkeys.core.extent import needs_rescaling
from fewkeys.core.precision import lowered, working
from fewkeys.core.validation import check_finite, check_tensor, largest_entries


def check_tokens(
    key: object, value: object, key_mask: object, before: Sequence[Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    """Keys, values and which are real (B, N), once they match each other and the keys and values `before`, if any."""
    k, v = lowered(check_tensor("key", key)), lowered(check_tensor("value", value))
    if v.shape[:3] != k.shape[:3] or v.dtype != k.dtype or v.device != k.device:
        raise ValueError(
            f"value: expected {tuple(k.shape[:3])} (batch, heads, tokens), {k.dtype} on {k.device} like key, got "
            f"{tuple(v.shape[:3])}, {v.dtype} on {v.device}"
        )
    for name, new, old in zip(("key", "value"), (k, v), before, strict=False):
        wanted, came = (*old.shape[:2], old.shape[3]), (*new.shape[:2], new.shape[3])
        if wanted != came or new.dtype != old.dtype or new.device != old.device:
            raise ValueError(
                f"{name}: expected (batch, heads, dim) = {wanted}, {old.dtype} on {old.device} like the tokens "
                f"before, got {came}, {new.dtype} on {new.device}"
            )
    if key_mask is None:
        real = torch.ones((k.shape[0], k.shape[2]), dtype=torch.bool, device=k.device)
    elif isinstance(key_mask, Tensor) and key_mask.dtype == torch.bool and key_mask.shape == (k.shape[0], k.shape[2]):
        real = key_mask.to(k.device)
        k, v = (tensor.masked_fill(~real[:, None, :, None], 0.0) for tensor in (k, v))
    else:
        found = f"{key_mask.dtype} {tuple(key_mask.shape)}" if isinstance(key_mask, Tensor) else type(key_mask)
        raise ValueError(f"key_mask: expected a bool tensor {(k.shape[0], k.shape[2])}, got {found}")
    check_finite(key=k, value=v)
    return k, v, real


def check_query(query: Tensor, key: Tensor) -> None:
    """Raise `ValueError` where queries cannot ask for the last of these keys."""
    batch, heads, tokens, dim = key.shape
    shape = query.shape
    if shape[0] != batch or shape[1] % heads or shape[2] > tokens or shape[3] != dim or query.dtype != key.dtype:
        raise ValueError(
            f"query: expected ({batch}, a multiple of {heads}, at most {tokens}, {dim}) in {key.dtype} for the "
            f"tokens last appended, got {tuple(shape)} in {query.dtype}"
        )
    check_finite(query=query)


def are_large(query: Tensor | None, key: Tensor, value: Tensor, scale: float) -> bool:
    """Whether queries, keys and values are so large that sums of their squares may have no float."""
    asked = () if query is None else (query,)
    largest = largest_entries(key, value, *asked)
    tops = (largest[2] if asked else 0.0, *largest[:2])
    return needs_rescaling(tops, scale, key.shape[3], working(key[:0]).dtype)
