"""Exact attention: every query attends to every key it may see."""

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from fewkeys.core.derivatives import are_transformed, gradients_of
from fewkeys.core.extent import FINITE, rescaled
from fewkeys.core.graph import Graph, visible
from fewkeys.core.inputs import Inputs
from fewkeys.core.precision import full_precision
from fewkeys.core.weights import Softmax, Weights
from fewkeys.execute import reference
from fewkeys.execute.problem import Problem

ROWS = 512
"""Queries whose mask is made at once. Torch's own causal kernel needs none, but knows neither padding nor offsets."""


def attend(inputs: Inputs, weights: Weights) -> Tensor:
    """The output (B, Hq, Nq, Dv), zero for queries that see no key: `Softmax` through torch's fused kernels, but dense
    under `impl="reference"`. Inputs are rescaled where scores could overflow.
    """
    if not inputs.needs_rescaling:
        return _attend(inputs, weights)
    x, restore = rescaled(inputs.clear(), FINITE)
    return restore(_attend(x, weights))


def _attend(x: Inputs, weights: Weights) -> Tensor:
    if x.impl == "reference" or not isinstance(weights, Softmax):
        x = x.clear()
        return reference.attend(Problem(x, Graph.full(x), None, weights))
    if x.bias is not None and not x.is_causal and x.valid is None and x.query.device.type == "cpu":
        # Biases of reversed queries take no memory. Kernels of other devices want whole rows.
        bias = x.bias.from_last(x.offset, x.offset + x.queries, x.keys).to(x.query.dtype)
        return _sdpa(replace(x, query=x.query.flip(2)), bias.unsqueeze(0), False).flip(2)
    if x.is_causal and x.offset == 0 and x.valid is None and x.bias is None:
        return _sdpa(x, None, True)
    # With an offset of all keys or more, causality hides nothing.
    causal = x.is_causal and x.offset < x.keys - 1
    if not causal and x.bias is None:
        return _sdpa(x, None, False) if x.valid is None else _masked(x, x.valid[:, None, None])
    outputs = []
    for start in range(0, x.queries, ROWS):
        stop = min(x.queries, start + ROWS)
        last = min(x.keys, stop + x.offset) if causal else x.keys
        query, key, value = x.query[:, :, start:stop], x.key[:, :, :last], x.value[:, :, :last]
        part = replace(x, query=query, key=key, value=value, offset=x.offset + start)
        outputs.append(_masked(part, visible(x, start, stop)[..., :last]))
    return torch.cat(outputs, 2)


def _masked(x: Inputs, seen: Tensor) -> Tensor:
    """Attention to the keys that are `seen`, broadcastable to (B, Hq, Nq, Nk)."""
    # A row that sees nothing would be 0 / 0: it is allowed everything and then set to zero.
    empty = ~seen.any(-1, keepdim=True)
    mask = seen | empty
    if x.bias is not None:
        bias = x.bias.of(x.offset, x.offset + x.queries, x.keys).to(x.query.dtype)
        mask = bias.masked_fill(~mask, -torch.inf)
    output = _sdpa(x, mask, False)
    return output.masked_fill(empty, 0.0) if bool(empty.any()) else output


def _sdpa(x: Inputs, mask: Tensor | None, is_causal: bool) -> Tensor:
    query, scale = x.query, x.scale
    if scale <= 0 and x.bias is None:
        # Torch's causal kernels hide keys before they scale: -inf would become +inf or NaN.
        query, scale = (-query, -scale) if scale else (query * 0.0, 1.0)
    fused = partial(
        scaled_dot_product_attention, attn_mask=mask, is_causal=is_causal, scale=scale, enable_gqa=x.gqa_ratio > 1
    )
    rows = query, x.key, x.value
    if torch.compiler.is_dynamo_compiling() or not torch.is_grad_enabled() or (mask is not None and mask.requires_grad):
        return fused(*rows)
    if are_transformed(*rows):
        with sdpa_kernel(SDPBackend.MATH):
            return fused(*rows)
    if not any(part.requires_grad for part in rows):
        return fused(*rows)
    output: Tensor = _Fused.apply(fused, *rows)  # type: ignore[no-untyped-call]
    return output


class _Fused(torch.autograd.Function):
    """Torch's fused attention, whose gradients torch cannot differentiate; second derivatives use plain operations."""

    @staticmethod
    def forward(ctx: Any, fused: partial[Tensor], *rows: Tensor) -> Tensor:
        with torch.enable_grad():
            leaves = [part.detach().requires_grad_(part.requires_grad) for part in rows]
            output = fused(*leaves)
        ctx.save_for_backward(*rows)
        ctx.fused, ctx.leaves, ctx.output = fused, leaves, output
        return output.detach()

    @staticmethod
    @full_precision()
    def backward(ctx: Any, gradient: Tensor) -> Any:
        if not torch.is_grad_enabled():
            return (None, *gradients_of(ctx.leaves, [(ctx.output, gradient)]))
        with sdpa_kernel(SDPBackend.MATH):
            rows = ctx.saved_tensors
            return (None, *gradients_of(rows, [(ctx.fused(*rows), gradient)]))
