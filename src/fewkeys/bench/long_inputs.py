"""Queries, keys and values of any length: random ones, and captured ones, one text segment after another."""

from __future__ import annotations

import torch
from torch import Tensor

from fewkeys.bench.timing import Draw
from fewkeys.captures.capture import Capture


def random_inputs(dim: int, *, dtype: torch.dtype, seed: int = 0) -> Draw:
    """Independent normal numbers: good for time, meaningless for error."""

    def problem(length: int, heads: int) -> tuple[Tensor, Tensor, Tensor, float]:
        draw = torch.Generator("cpu").manual_seed(seed)
        tensors = [torch.randn(1, heads, length, dim, generator=draw).to(dtype) for _ in range(3)]
        return tensors[0], tensors[1], tensors[2], dim**-0.5

    return problem


def captured_inputs(capture: Capture, *, dtype: torch.dtype) -> Draw:
    """The first heads of the middle layer, its sequences joined end to end.

    The context is longer than those of the model. More tokens or key heads than the capture holds raise `ValueError`.
    """
    if capture.biased:
        raise ValueError(
            "capture: expected a model without a distance bias, got one with a bias, whose values for longer texts are "
            "unknown; use another model, or random inputs"
        )
    layer = capture.layers // 2
    gqa_ratio = capture.query_heads // capture.kv_heads

    def problem(length: int, heads: int) -> tuple[Tensor, Tensor, Tensor, float]:
        if length > capture.tokens or heads > capture.kv_heads:
            raise ValueError(
                f"lengths, heads: expected at most {capture.tokens} tokens (all of the text) and {capture.kv_heads} "
                f"heads (the model's), got {length} and {heads}; give more text or ask for less"
            )
        joined: list[list[Tensor]] = [[], [], []]
        for call in capture.calls(layer):
            for row in range(len(call.query)):
                real = slice(None) if call.key_mask is None else call.key_mask[row]
                for part, tensor in zip(joined, (call.query, call.key, call.value), strict=True):
                    part.append(tensor[row][:, real])
        query, key, value = (torch.cat(part, 1)[None, :, :length].to(dtype) for part in joined)
        return (
            query[:, : heads * gqa_ratio].contiguous(),
            key[:, :heads].contiguous(),
            value[:, :heads].contiguous(),
            capture.scales[layer],
        )

    return problem
