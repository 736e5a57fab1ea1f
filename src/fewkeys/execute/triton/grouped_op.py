"""The operator `fewkeys::grouped`: how the kernels of groups are launched, and what torch must know of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from fewkeys.execute.triton import grouped_backward, grouped_forward
from fewkeys.execute.triton.grouped_tiles import Order, key_tiles, query_tiles
from fewkeys.execute.triton.op import constants, near_of, saving, split

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


class Sizes(NamedTuple):
    """Numbers of things, and the reach of the band; `groups` counts the query heads of a key head."""

    heads: int
    groups: int
    queries: int
    keys: int
    entries: int
    offset: int
    band_left: int
    band_right: int


class Problem:
    """The operator's arguments as the kernels take them."""

    def __init__(self, tensors: Sequence[Any], numbers: Sequence[Any]) -> None:
        self.near = near_of(*tensors[:4])
        listed = None if tensors[4] is None else tensors[4].contiguous()
        members: list[Tensor] = [tensor.contiguous() for tensor in tensors[5:]]
        self.members = Members(listed, *members)
        count, self.alpha, self.scale, band_left, band_right, offset, self.is_causal = numbers
        batch, heads, queries, _ = self.near.query.shape
        self.shared, self.rows = batch * self.near.key.shape[1], batch * heads
        self.sizes = Sizes(
            heads,
            heads // self.near.key.shape[1],
            queries,
            self.near.key.shape[2],
            0 if listed is None else listed.shape[2],
            offset,
            band_left,
            band_right,
        )
        self.factor = self.scale * (LOG2_E if self.alpha == 1 else self.alpha - 1)
        self.block_m, self.block_n = self._tile_sizes()
        group, order, key_group, key_order = (tensor.flatten(0, 1) for tensor in members)
        self.queries, self.keys = Order(group, order, count), Order(key_group, key_order, count)

    def options(self, *names: str) -> dict[str, Any]:
        """Constants for a kernel: those that all take, and those named."""
        known = {"CAUSAL": self.is_causal, "BAND": self.sizes.band_left + self.sizes.band_right >= 0}
        own = {"ALPHA": self.alpha, "BLOCK_M": self.block_m, "BLOCK_N": self.block_n, "num_warps": 8}
        return constants(self.near) | own | {name: known[name] for name in names}

    def _tile_sizes(self) -> tuple[int, int]:
        """Queries and keys per tile: with their rows' addresses, few spill from eight warps' registers (sm_90)."""
        widest = max(self.near.query.shape[3], self.near.value.shape[3])
        if self.near.query.dtype == torch.float32:
            return (16, 16) if widest > 64 else (32, 32)
        return (32, 32) if widest > 128 else (64, 32)

    def query_tiles(self) -> Tensor:
        return query_tiles(self.queries, self.keys, self.block_m, self.sizes.offset, self.is_causal)

    def key_tiles(self) -> Tensor:
        return key_tiles(self.queries, self.keys, self.block_n, self.sizes.offset, self.is_causal)


def _forward(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    x = Problem(arguments[:TENSORS], arguments[TENSORS:])
    found = _forward_shapes(*arguments)
    tiles = x.query_tiles()
    with torch.cuda.device_of(found[0]):
        grouped_forward.attend_groups[tiles.shape[1], x.rows](
            x.near, x.members, tiles, x.sizes, x.factor, *found, **x.options("CAUSAL", "BAND")
        )
    return found


def _forward_shapes(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Output (B, Hq, Nq, Dv), level and share of every row (B, Hq, Nq), float32."""
    query, value = arguments[0], arguments[2]
    rows = query.shape[:3]
    level, share = (query.new_empty(rows, dtype=torch.float32) for _ in range(2))
    return query.new_empty((*rows, value.shape[3])), level, share


def _backward(
    grad: Tensor, output: Tensor, level: Tensor, share: Tensor, *arguments: Any
) -> tuple[Tensor, Tensor, Tensor]:
    x = Problem(arguments[:TENSORS], arguments[TENSORS:])
    found = _backward_shapes(grad, output, level, share, *arguments)
    grad, output = grad.contiguous(), output.contiguous()
    delta = torch.empty_like(level)
    of_rows = (level, share, grad, delta)
    # Query heads that share keys have groups of their own: each writes its own sums.
    sums = [query_heads(tensor, x.sizes.heads) for tensor in found[1:]]
    with torch.cuda.device_of(grad):
        tiles = x.query_tiles()
        grouped_backward.query_gradients[tiles.shape[1], x.rows](
            x.near,
            x.members,
            tiles,
            x.sizes,
            x.factor,
            x.scale,
            output,
            *of_rows,
            found[0],
            **x.options("CAUSAL", "BAND"),
        )
        tiles = x.key_tiles()
        grouped_backward.group_gradients[tiles.shape[1], x.rows](
            x.near, x.members, tiles, x.sizes, x.factor, x.scale, *of_rows, *sums, **x.options("CAUSAL")
        )
        if x.members.listed is not None:
            _add_list(x, of_rows, x.members.listed, sums)
        grid = (triton.cdiv(x.sizes.keys, x.block_n), x.shared)
        grouped_backward.band_gradients[grid](
            x.near, x.members, x.sizes, x.factor, x.scale, *of_rows, *sums, *found[1:], **x.options()
        )
    return found


def query_heads(tensor: Tensor, heads: int) -> Tensor:
    """Room for float32 rows (B, Hq, Nk, X) beside rows (B, Hkv, Nk, X)."""
    return tensor.new_empty((tensor.shape[0], heads, *tensor.shape[2:]), dtype=torch.float32)


def _add_list(x: Problem, of_rows: tuple[Tensor, ...], listed: Tensor, sums: list[Tensor]) -> None:
    """Add the gradients of the list's keys and values to the sums of the first query head of each key head."""
    across = triton.cdiv(x.sizes.entries, x.block_n)
    parts, tiles = split(triton.cdiv(x.sizes.queries, x.block_m) * x.sizes.groups, across * x.shared)
    added = [total.new_empty((parts, x.shared, x.sizes.entries, total.shape[3])) for total in sums]
    grouped_backward.list_gradients[across, parts, x.shared](
        x.near, x.members, x.sizes, x.factor, x.scale, *of_rows, tiles, *added, **x.options("CAUSAL")
    )
    place = listed.flatten(0, 1).long().clamp_max(x.sizes.keys - 1).unsqueeze(-1)
    for total, add in zip(sums, added, strict=True):
        # No used key is listed twice, and fillings add zeros: the order of the additions does not matter.
        first = total.view(x.shared, x.sizes.groups, *total.shape[2:])[:, 0]
        first.scatter_add_(1, place.expand(-1, -1, total.shape[3]), add.sum(0))


def _backward_shapes(
    grad: Tensor, output: Tensor, level: Tensor, share: Tensor, *arguments: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value."""
    query, key, value = (tensor.new_empty(tensor.shape) for tensor in arguments[:3])
    return query, key, value


def _differentiate(ctx: Any, grad: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
    tensors = ctx.saved_tensors
    found = grouped_backward_op(grad, *tensors[TENSORS:], *tensors[:TENSORS], *ctx.numbers)
    return *found, *[None] * (TENSORS - 3 + len(ctx.numbers))


grouped = torch.library.custom_op(
    "fewkeys::grouped", _forward, mutates_args=(), schema=f"({_ARGUMENTS}) -> (Tensor, Tensor, Tensor)"
)
"""Attention inside groups, beside a band and a shared list: outputs, and the level and share of the rows.

`alpha` is 1 for softmax, and in (1, 2] for entmax. `hidden` (B, Hkv, Nk), uint8, marks keys that no band reaches. Only
the outputs have gradients, and these have none.
"""
grouped_backward_op = torch.library.custom_op(
    "fewkeys::grouped_backward",
    _backward,
    mutates_args=(),
    schema=f"(Tensor grad, Tensor output, Tensor level, Tensor share, {_ARGUMENTS}) -> (Tensor, Tensor, Tensor)",
)
grouped.register_fake(_forward_shapes)
grouped_backward_op.register_fake(_backward_shapes)
grouped.register_autograd(_differentiate, setup_context=saving(TENSORS))
