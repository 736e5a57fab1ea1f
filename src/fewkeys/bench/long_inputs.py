"""Queries, keys and values of any length: random ones, and captured ones, one sequence after another."""

import torch
from torch import Tensor

from fewkeys.bench.timing import Draw
from fewkeys.captures.capture import Capture


def random_inputs(dim: int, *, dtype: torch.dtype) -> Draw:
    """Normal numbers: good for time, meaningless for error."""

    def problem(length: int, heads: int) -> tuple[Tensor, Tensor, Tensor, float]:
        draw = torch.Generator("cpu").manual_seed(0)
        query, key, value = (torch.randn(1, heads, length, dim, generator=draw).to(dtype) for _ in range(3))
        return query, key, value, dim**-0.5

    return problem


def captured_inputs(capture: Capture, *, dtype: torch.dtype) -> Draw:
    """The first heads of the middle layer, its sequences joined end to end: longer than a context of the model."""
    if capture.biased:
        raise ValueError(
            "capture: expected a model without a distance bias, got one with a bias, whose values for longer texts are "
            "unknown; use another model, or random inputs"
        )
    layer = capture.layers // 2

    def problem(length: int, heads: int) -> tuple[Tensor, Tensor, Tensor, float]:
        if length > capture.tokens or heads > capture.kv_heads:
            raise ValueError(
                f"lengths, heads: expected at most {capture.tokens} tokens (all of the text) and {capture.kv_heads} "
                f"heads (the model's), got {length} and {heads}; give more text or ask for less"
            )

        def rows(name: str, count: int) -> Tensor:
            calls = ((getattr(call, name)[:, :count].movedim(1, 0), call.key_mask) for call in capture.calls(layer))
            tokens = [by_head.flatten(1, 2) if mask is None else by_head[:, mask] for by_head, mask in calls]
            return torch.cat(tokens, 1)[None, :, :length].to(dtype).contiguous()

        query = rows("query", heads * capture.query_heads // capture.kv_heads)
        return query, rows("key", heads), rows("value", heads), capture.scales[layer]

    return problem
