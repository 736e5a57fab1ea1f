"""The operator `fewkeys::near_heavy_means`: how the kernels are launched, and what torch must know of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from fewkeys.execute.triton import backward, forward
from fewkeys.sketch.triton.tiles import constants, power_of_two, precision

PROGRAMS = 512
"""Programs that a sum over all queries is split among: a few for each processor of a large GPU."""

_ARGUMENTS = """Tensor query, Tensor key, Tensor value, Tensor? hidden,
    Tensor? list_key, Tensor? list_value, Tensor? list_place,
    Tensor? mean_key, Tensor? mean_value, Tensor? mean_bias, Tensor? mean_total, Tensor? label, Tensor? share,
    Tensor? left, Tensor? right, Tensor? factor, Tensor? bounds,
    float scale, int band_left, int band_right, int offset, bool is_causal"""
DIFFERENTIABLE = (0, 1, 2, 4, 5, 7, 8, 9, 13, 14, 15)
"""Places of the arguments that have gradients: query, key, value; of the list key, value; of the stand-ins key, value,
bias, left, right, factor."""
TENSORS = 17


class Near(NamedTuple):
    """Queries, and the keys of the band; `hidden` (uint8) marks keys that no band reaches."""

    query: Tensor
    key: Tensor
    value: Tensor
    hidden: Tensor | None
    query_strides: tuple[int, ...]
    key_strides: tuple[int, ...]
    value_strides: tuple[int, ...]


class Listed(NamedTuple):
    """Keys that all queries of a head share; `place` (int32) tells where they stand, Nk at fillings."""

    key: Tensor | None
    value: Tensor | None
    place: Tensor | None


class Means(NamedTuple):
    """Stand-ins; `label` (B, Hkv, Nk), int32, tells each key's, `share` what the key counts for there."""

    key: Tensor | None
    value: Tensor | None
    bias: Tensor | None
    total: Tensor | None
    label: Tensor | None
    share: Tensor | None
    left: Tensor | None
    right: Tensor | None
    factor: Tensor | None
    bounds: Tensor | None


class Sizes(NamedTuple):
    """Numbers of things, and the reach of the band; `gqa_ratio`: query heads of a key head."""

    heads: int
    gqa_ratio: int
    queries: int
    keys: int
    entries: int
    means: int
    offset: int
    band_left: int
    band_right: int


class Made(NamedTuple):
    """The constants that a kernel is compiled for; a `BLOCK_` is the size of a tile."""

    D: Any
    DV: Any
    RANK: Any
    ALPHA: Any
    CAUSAL: Any
    BAND: Any
    BLOCK_M: Any
    BLOCK_N: Any
    BLOCK_D: Any
    BLOCK_V: Any
    BLOCK_R: Any
    PRECISION: Any


class Call(NamedTuple):
    """All that every kernel takes."""

    near: Near
    listed: Listed
    means: Means
    sizes: Sizes
    scale: float
    made: Made


class Problem:
    """The operator's arguments as the kernels take them, and the options of a launch."""

    def __init__(self, tensors: Sequence[Any], numbers: Sequence[Any]) -> None:
        near = near_of(*tensors[:4])
        others = [None if tensor is None else tensor.contiguous() for tensor in tensors[4:]]
        self.listed, self.means = Listed(*others[:3]), Means(*others[3:])
        scale, band_left, band_right, offset, is_causal = numbers
        entries, means = (0 if key is None else key.shape[2] for key in (self.listed.key, self.means.key))
        self.sizes = sizes_of(near, entries, means, offset, band_left, band_right)
        self.rows, self.shared = near.query.shape[0] * self.sizes.heads, near.key.shape[0] * near.key.shape[1]
        self.rank = 0 if self.means.left is None else self.means.left.shape[3]
        widest, whole = max(near.query.shape[3], near.value.shape[3]), near.query.dtype == torch.float32
        # 16-bit kernels hold a tile in registers (sm_90), all in the 99 KB of small GPUs.
        large, small = ((32, 32), (16, 16)) if whole else ((64, 32), (32, 32))
        self.block_m, self.block_n = small if widest > 128 else large
        made = made_of(near, self.rank, 1.0, is_causal, True, self.block_m, self.block_n)
        self.call = Call(near, self.listed, self.means, self.sizes, scale, made)
        wide = widest * near.query.element_size() > 256
        self.options = {"num_warps": 8 if wide else 4, "num_stages": 2}

    def split(self, programs: int) -> tuple[int, int]:
        """How many parts the queries of a key head come in, beside `programs` other programs, and tiles per part."""
        return split(triton.cdiv(self.sizes.queries, self.block_m) * self.sizes.gqa_ratio, programs)


def near_of(query: Tensor, key: Tensor, value: Tensor, hidden: Tensor | None) -> Near:
    """Queries, keys and values in any layout whose last dimension is dense."""
    query, key, value = (x if x.stride(-1) == 1 else x.contiguous() for x in (query, key, value))
    hidden = None if hidden is None else hidden.contiguous()
    return Near(query, key, value, hidden, query.stride()[:3], key.stride()[:3], value.stride()[:3])


def sizes_of(near: Near, entries: int, means: int, offset: int, band_left: int, band_right: int) -> Sizes:
    """Numbers of things, and the reach of the band."""
    heads, kv_heads = near.query.shape[1], near.key.shape[1]
    reach = (offset, band_left, band_right)
    return Sizes(heads, heads // kv_heads, near.query.shape[2], near.key.shape[2], entries, means, *reach)


def made_of(near: Near, rank: int, alpha: float, is_causal: bool, band: bool, block_m: int, block_n: int) -> Made:
    """The constants of kernels for such tensors and tiles."""
    dim, value_dim = near.query.shape[3], near.value.shape[3]
    blocks = (block_m, block_n, power_of_two(dim), power_of_two(value_dim), power_of_two(rank))
    return Made(*constants((dim, value_dim, rank, alpha, is_causal, band, *blocks, precision())))


def split(tiles: int, programs: int) -> tuple[int, int]:
    """How many parts so many tiles come in, beside `programs` other programs, and tiles per part."""
    each = -(-tiles // max(1, PROGRAMS // programs))
    return -(-tiles // each), each


def _forward(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    x = Problem(arguments[:TENSORS], arguments[TENSORS:])
    found = _forward_shapes(*arguments)
    with torch.cuda.device_of(found[0]):
        forward.attend_rows[triton.cdiv(x.sizes.queries, x.block_m), x.rows](x.call, *found, **x.options)
    return found


def _forward_shapes(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Output (B, Hq, Nq, Dv), log2 of every row's sum and its slope (B, Hq, Nq), float32."""
    query, value, left = arguments[0], arguments[2], arguments[13]
    rows = query.shape[:3]
    log_mass = query.new_empty(rows, dtype=torch.float32)
    slope = query.new_empty((0,) if left is None else rows, dtype=torch.float32)
    return query.new_empty((*rows, value.shape[3])), log_mass, slope


def _backward(grad: Tensor, output: Tensor, log_mass: Tensor, slope: Tensor, *arguments: Any) -> list[Tensor]:
    x = Problem(arguments[:TENSORS], arguments[TENSORS:])
    found = empty_like(arguments, DIFFERENTIABLE)
    grad, output = grad.contiguous(), output.contiguous()
    delta, lift = torch.empty_like(log_mass), torch.empty_like(slope)
    of_rows = (log_mass, grad, delta, lift)
    with torch.cuda.device_of(grad):
        backward.query_gradients[triton.cdiv(x.sizes.queries, x.block_m), x.rows](
            x.call, output, log_mass, slope, grad, delta, lift, found[0], **x.options
        )
        every = triton.cdiv(x.sizes.queries, x.block_m) * x.sizes.gqa_ratio
        backward.key_gradients[triton.cdiv(x.sizes.keys, x.block_n), 1, x.shared](
            x.call, *of_rows, every, *found[1:3], None, None, forward.BAND, **x.options
        )
        if x.listed.key is not None:
            _shared_gradients(x, x.sizes.entries, of_rows, found[3:5], forward.LISTED)
        if x.means.key is not None:
            _shared_gradients(x, x.sizes.means, of_rows, [*found[5:8], found[10]], forward.MEANS)
        if x.rank:
            parts, tiles = x.split(x.shared)
            sums = [tensor.new_empty((parts, *tensor.shape), dtype=torch.float32) for tensor in found[8:10]]
            backward.slope_gradients[parts, x.shared](x.call, slope, grad, tiles, *sums, **x.options)
            _add_up(sums, found[8:10])
    return found


def _shared_gradients(
    x: Problem, entries: int, of_rows: tuple[Tensor, ...], found: list[Tensor], part: triton.language.constexpr
) -> None:
    """Write the gradients of the stand-ins (key, value, bias, factor) or of the list (key, value) to `found`."""
    across = triton.cdiv(entries, x.block_n)
    parts, tiles = x.split(across * x.shared)
    sums = [tensor.new_empty((parts, *tensor.shape), dtype=torch.float32) for tensor in found]
    outputs = [*sums, None, None][:4]
    backward.key_gradients[across, parts, x.shared](x.call, *of_rows, tiles, *outputs, part, **x.options)
    _add_up(sums, found)


def _add_up(sums: list[Tensor], found: list[Tensor]) -> None:
    """Write the sums over all parts, in the dtype of what they are the gradients of."""
    for total, result in zip(sums, found, strict=True):
        result.copy_(total.sum(0))


def empty_like(arguments: Sequence[Any], places: Sequence[int]) -> list[Tensor]:
    """Room for the gradients of the arguments at `places`; empty for those that are None."""
    tensors, like = [arguments[place] for place in places], arguments[0]
    return [like.new_empty(0) if tensor is None else tensor.new_empty(tensor.shape) for tensor in tensors]


def operator(
    name: str,
    forward: Callable[..., tuple[Tensor, Tensor, Tensor]],
    shapes: Callable[..., tuple[Tensor, Tensor, Tensor]],
    backward: Callable[..., list[Tensor]],
    arguments: str,
    tensors: int,
    places: Sequence[int],
) -> Callable[..., tuple[Tensor, Tensor, Tensor]]:
    """The operator `fewkeys::name`, whose first arguments are so many `tensors`, those at `places` with gradients.

    `backward` takes the gradient of the first output, all three outputs and the arguments. It is an operator as well.
    """
    run = torch.library.custom_op(
        f"fewkeys::{name}", forward, mutates_args=(), schema=f"({arguments}) -> (Tensor, Tensor, Tensor)"
    )
    given = f"Tensor grad, Tensor output, Tensor first, Tensor second, {arguments}"
    back = torch.library.custom_op(
        f"fewkeys::{name}_backward", backward, mutates_args=(), schema=f"({given}) -> Tensor[]"
    )

    def save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.save_for_backward(*inputs[:tensors], *output)
        ctx.numbers = inputs[tensors:]
        ctx.mark_non_differentiable(*output[1:])

    def differentiate(ctx: Any, grad: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        inputs, outputs = ctx.saved_tensors[:tensors], ctx.saved_tensors[tensors:]
        found = back(grad, *outputs, *inputs, *ctx.numbers)
        gradients: list[Tensor | None] = [None] * (tensors + len(ctx.numbers))
        for place, gradient in zip(places, found, strict=True):
            if inputs[place] is not None:
                gradients[place] = gradient
        return tuple(gradients)

    run.register_fake(shapes)
    back.register_fake(lambda *all_given: empty_like(all_given[4:], places))
    run.register_autograd(differentiate, setup_context=save)
    return run


near_heavy_means = operator(
    "near_heavy_means", _forward, _forward_shapes, _backward, _ARGUMENTS, TENSORS, DIFFERENTIABLE
)
"""The softmax of the band, the shared list and the stand-ins: outputs, log2 of the rows' sums, slopes of the rows.

Only the outputs have gradients, and these have none. `mean_total` (B, Hkv, C) and `share` count keys; counts carry no
gradient.
"""
