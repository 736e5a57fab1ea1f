"""The operator `fewkeys::grouped`: how the kernels of groups are launched, and what torch must know of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from fewkeys.execute.triton import grouped_backward, grouped_forward
from fewkeys.execute.triton.grouped_tiles import Order, key_tiles, query_tiles
from fewkeys.execute.triton.op import Made, Near, Sizes, empty_like, made_of, near_of, operator, sizes_of, split

LOG2_E = 1.4426950408889634
_ARGUMENTS = """Tensor query, Tensor key, Tensor value, Tensor? hidden, Tensor? listed,
    Tensor query_group, Tensor query_order, Tensor key_group, Tensor key_order,
    int count, float alpha, float scale, int band_left, int band_right, int offset, bool is_causal"""
TENSORS = 9


class Members(NamedTuple):
    """Who is in which group, -1 for none, and all tokens of a head by group: (B, Hq, Nq) or (B, Hq, Nk).

    `listed` (B, Hkv, S): places of the keys that all queries of a head share, Nk at fillings. All are int32.
    """

    listed: Tensor | None
    query_group: Tensor
    query_order: Tensor
    key_group: Tensor
    key_order: Tensor


class Call(NamedTuple):
    """All that every kernel takes."""

    near: Near
    members: Members
    sizes: Sizes
    scale: float
    factor: float
    made: Made


class Problem:
    """The operator's arguments as the kernels take them, and the options of a launch."""

    def __init__(self, tensors: Sequence[Any], numbers: Sequence[Any]) -> None:
        near = near_of(*tensors[:4])
        self.listed = None if tensors[4] is None else tensors[4].contiguous()
        own: list[Tensor] = [tensor.contiguous() for tensor in tensors[5:]]
        count, alpha, scale, band_left, band_right, offset, self.is_causal = numbers
        entries = 0 if self.listed is None else self.listed.shape[2]
        self.sizes = sizes_of(near, entries, 0, offset, band_left, band_right)
        self.rows, self.shared = near.query.shape[0] * self.sizes.heads, near.key.shape[0] * near.key.shape[1]
        widest = max(near.query.shape[3], near.value.shape[3])
        # With their rows' addresses, few spill from eight warps' registers (sm_90).
        if near.query.dtype == torch.float32:
            self.block_m, self.block_n = (16, 16) if widest > 64 else (32, 32)
        else:
            self.block_m, self.block_n = (32, 32) if widest > 128 else (64, 32)
        made = made_of(near, 0, alpha, self.is_causal, band_left + band_right >= 0, self.block_m, self.block_n)
        factor = scale * (LOG2_E if alpha == 1 else alpha - 1)
        self.call = Call(near, Members(self.listed, *own), self.sizes, scale, factor, made)
        group, order, key_group, key_order = (tensor.flatten(0, 1) for tensor in own)
        self.options = {"num_warps": 8, "num_stages": 2}
        self.queries, self.keys = Order(group, order, count), Order(key_group, key_order, count)

    def query_tiles(self) -> Tensor:
        return query_tiles(self.queries, self.keys, self.block_m, self.sizes.offset, self.is_causal)

    def key_tiles(self) -> Tensor:
        return key_tiles(self.queries, self.keys, self.block_n, self.sizes.offset, self.is_causal)


def _forward(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    x = Problem(arguments[:TENSORS], arguments[TENSORS:])
    found = _forward_shapes(*arguments)
    tiles = x.query_tiles()
    with torch.cuda.device_of(found[0]):
        grouped_forward.attend_groups[tiles.shape[1], x.rows](x.call, tiles, *found, **x.options)
    return found


def _forward_shapes(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Output (B, Hq, Nq, Dv), level and inverse of every row (B, Hq, Nq), float32."""
    query, value = arguments[0], arguments[2]
    rows = query.shape[:3]
    level, inverse = (query.new_empty(rows, dtype=torch.float32) for _ in range(2))
    return query.new_empty((*rows, value.shape[3])), level, inverse


def _backward(grad: Tensor, output: Tensor, level: Tensor, inverse: Tensor, *arguments: Any) -> list[Tensor]:
    x = Problem(arguments[:TENSORS], arguments[TENSORS:])
    found = empty_like(arguments, range(3))
    grad, output = grad.contiguous(), output.contiguous()
    of_rows = (level, inverse, grad, torch.empty_like(level))
    # Query heads that share keys have groups of their own: each writes its own sums.
    sums = [query_heads(tensor, x.sizes.heads) for tensor in found[1:]]
    with torch.cuda.device_of(grad):
        tiles = x.query_tiles()
        grouped_backward.query_gradients[tiles.shape[1], x.rows](x.call, tiles, output, *of_rows, found[0], **x.options)
        tiles = x.key_tiles()
        grouped_backward.group_gradients[tiles.shape[1], x.rows](x.call, tiles, *of_rows, *sums, **x.options)
        every = triton.cdiv(x.sizes.queries, x.block_m) * x.sizes.gqa_ratio
        if x.listed is not None:
            across = triton.cdiv(x.sizes.entries, x.block_n)
            parts, each = split(every, across * x.shared)
            added = [total.new_empty((parts, x.shared, x.sizes.entries, total.shape[3])) for total in sums]
            grouped_backward.key_gradients[across, parts, x.shared](
                x.call, *of_rows, each, None, None, *added, True, **x.options
            )
            _add_list(x, x.listed, added, sums)
        grouped_backward.key_gradients[triton.cdiv(x.sizes.keys, x.block_n), 1, x.shared](
            x.call, *of_rows, every, *sums, *found[1:], False, **x.options
        )
    return found


def query_heads(tensor: Tensor, heads: int) -> Tensor:
    """Room for float32 rows (B, Hq, Nk, X) beside rows (B, Hkv, Nk, X)."""
    return tensor.new_empty((tensor.shape[0], heads, *tensor.shape[2:]), dtype=torch.float32)


def _add_list(x: Problem, listed: Tensor, added: list[Tensor], sums: list[Tensor]) -> None:
    """Add the gradients of the list's keys and values to the sums of the first query head of each key head."""
    place = listed.flatten(0, 1).long().clamp_max(x.sizes.keys - 1).unsqueeze(-1)
    for total, add in zip(sums, added, strict=True):
        # No used key is listed twice, and fillings add zeros: the order of the additions does not matter.
        first = total.view(x.shared, x.sizes.gqa_ratio, *total.shape[2:])[:, 0]
        first.scatter_add_(1, place.expand(-1, -1, total.shape[3]), add.sum(0))


grouped = operator("grouped", _forward, _forward_shapes, _backward, _ARGUMENTS, TENSORS, range(3))
"""Attention inside groups, beside a band and a shared list: outputs, and the level and inverse of the rows.

`alpha` is 1 for softmax, and in (1, 2] for entmax. `hidden` (B, Hkv, Nk), uint8, marks keys that no band reaches. Only
the outputs have gradients, and these have none.
"""
