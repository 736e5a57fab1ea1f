"""The operator `fewkeys::near_heavy_means`: how the kernels are launched, and what torch must know of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from fewkeys.execute.triton import backward, forward
from fewkeys.sketch.triton.tiles import power_of_two, precision

PROGRAMS = 512
"""Programs that a sum over all queries is split among: a few for each processor of a large GPU."""

_ARGUMENTS = """Tensor query, Tensor key, Tensor value, Tensor? hidden,
    Tensor? list_key, Tensor? list_value, Tensor? list_place,
    Tensor? mean_key, Tensor? mean_value, Tensor? mean_bias, Tensor? mean_total, Tensor? label, Tensor? share,
    Tensor? left, Tensor? right, Tensor? factor,
    float scale, int band_left, int band_right, int offset, bool is_causal"""
DIFFERENTIABLE = (0, 1, 2, 4, 5, 7, 8, 9, 13, 14, 15)
"""Places of the arguments that have gradients: query, key, value; of the list key, value; of the stand-ins key, value,
bias, left, right, factor."""
TENSORS = 16


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


class Sizes(NamedTuple):
    """Numbers of things, and the reach of the band."""

    heads: int
    groups: int
    queries: int
    keys: int
    entries: int
    means: int
    offset: int
    band_left: int
    band_right: int


class Problem:
    """The operator's arguments as the kernels take them."""

    def __init__(self, tensors: Sequence[Tensor | None], numbers: Sequence[Any]) -> None:
        query, key, value = (tensor for tensor in tensors[:3] if tensor is not None)
        others = [None if tensor is None else tensor.contiguous() for tensor in tensors[4:]]
        self.near = near_of(query, key, value, tensors[3])
        self.listed, self.means = Listed(*others[:3]), Means(*others[3:])
        self.scale, band_left, band_right, offset, self.is_causal = numbers
        batch, heads, queries, self.dim = query.shape
        self.shared, self.value_dim = batch * key.shape[1], value.shape[3]
        self.rows = batch * heads
        self.sizes = Sizes(
            heads,
            heads // key.shape[1],
            queries,
            key.shape[2],
            0 if self.listed.key is None else self.listed.key.shape[2],
            0 if self.means.key is None else self.means.key.shape[2],
            offset,
            band_left,
            band_right,
        )
        self.rank = 0 if self.means.left is None else self.means.left.shape[3]

    @property
    def block(self) -> tuple[int, int]:
        """Queries and keys per tile: 16-bit kernels hold them in registers (sm_90), all in the 99 KB of small GPUs."""
        wide = max(self.dim, self.value_dim) > 128
        if self.near.query.dtype == torch.float32:
            return (16, 16) if wide else (32, 32)
        return (32, 32) if wide else (64, 32)

    def options(self, *names: str) -> dict[str, Any]:
        """Constants for a kernel: those that all take, and those named."""
        block_m, block_n = self.block
        known = {
            "RANK": self.rank,
            "CAUSAL": self.is_causal,
            "BLOCK_N": block_n,
            "BLOCK_R": power_of_two(self.rank),
        }
        wide = max(self.dim, self.value_dim) * self.near.query.element_size() > 256
        found = constants(self.near) | {"BLOCK_M": block_m, "num_warps": 8 if wide else 4}
        return found | {name: known[name] for name in names}

    def split(self, programs: int) -> tuple[int, int]:
        """How many parts the queries of a key head come in, beside `programs` other programs, and tiles per part."""
        return split(-(-self.sizes.queries // self.block[0]) * self.sizes.groups, programs)


def constants(near: Near) -> dict[str, Any]:
    """Constants of every kernel that the problem's dimensions and dtype decide."""
    dim, value_dim = near.query.shape[3], near.value.shape[3]
    return {
        "D": dim,
        "DV": value_dim,
        "BLOCK_D": power_of_two(dim),
        "BLOCK_V": power_of_two(value_dim),
        "PRECISION": precision(),
        "num_stages": 2,
    }


def split(tiles: int, programs: int) -> tuple[int, int]:
    """How many parts so many tiles come in, beside `programs` other programs, and tiles per part."""
    each = -(-tiles // max(1, PROGRAMS // programs))
    return -(-tiles // each), each


def near_of(query: Tensor, key: Tensor, value: Tensor, hidden: Tensor | None) -> Near:
    """Queries, keys and values in any layout whose last dimension is dense."""
    query, key, value = _rows(query), _rows(key), _rows(value)
    hidden = None if hidden is None else hidden.contiguous()
    return Near(query, key, value, hidden, query.stride()[:3], key.stride()[:3], value.stride()[:3])


def _rows(tensor: Tensor) -> Tensor:
    """Any layout whose last dimension is dense."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def _forward(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    problem = Problem(arguments[:TENSORS], arguments[TENSORS:])
    found = _forward_shapes(*arguments)
    grid = (triton.cdiv(problem.sizes.queries, problem.block[0]), problem.rows)
    options = problem.options("RANK", "CAUSAL", "BLOCK_N", "BLOCK_R")
    with torch.cuda.device_of(found[0]):
        forward.attend_rows[grid](
            problem.near, problem.listed, problem.means, problem.sizes, problem.scale, *found, **options
        )
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
    found = _backward_shapes(grad, output, log_mass, slope, *arguments)
    grad, output = grad.contiguous(), output.contiguous()
    delta, lift = torch.empty_like(log_mass), torch.empty_like(slope)
    with torch.cuda.device_of(grad):
        grid = (triton.cdiv(x.sizes.queries, x.block[0]), x.rows)
        of_rows = (output, log_mass, slope, grad, delta, lift, found[0])
        options = x.options("RANK", "CAUSAL", "BLOCK_N", "BLOCK_R")
        backward.query_gradients[grid](x.near, x.listed, x.means, x.sizes, x.scale, *of_rows, **options)
        grid = (triton.cdiv(x.sizes.keys, x.block[1]), x.shared)
        of_keys = (log_mass, grad, delta, found[1], found[2])
        backward.band_gradients[grid](x.near, x.sizes, x.scale, *of_keys, **x.options("BLOCK_N"))
        if x.listed.key is not None:
            _shared_gradients(x, False, (log_mass, grad, delta, lift), found[3:5])
        if x.means.key is not None:
            _shared_gradients(x, True, (log_mass, grad, delta, lift), [*found[5:8], found[10]])
        if x.rank:
            parts, tiles = x.split(x.shared)
            sums = [tensor.new_empty((parts, *tensor.shape), dtype=torch.float32) for tensor in found[8:10]]
            options = x.options("RANK", "BLOCK_R")
            backward.slope_gradients[parts, x.shared](
                x.near, x.means, x.sizes, x.scale, slope, grad, tiles, *sums, **options
            )
            _add_up(sums, found[8:10])
    return found


def _shared_gradients(x: Problem, counted: bool, of_rows: tuple[Tensor, ...], found: list[Tensor]) -> None:
    """Write the gradients of the stand-ins (key, value, bias, factor) or of the list (key, value) to `found`."""
    across = triton.cdiv(x.sizes.means if counted else x.sizes.entries, x.block[1])
    parts, tiles = x.split(across * x.shared)
    sums = [tensor.new_empty((parts, *tensor.shape), dtype=torch.float32) for tensor in found]
    outputs = sums if counted else [*sums, None, None]
    options = x.options("RANK", "CAUSAL", "BLOCK_N") | {"COUNTED": counted}
    if not counted:
        options["RANK"] = 0
    backward.shared_gradients[across, parts, x.shared](
        x.near, x.listed, x.means, x.sizes, x.scale, *of_rows, tiles, *outputs, **options
    )
    _add_up(sums, found)


def _add_up(sums: list[Tensor], found: list[Tensor]) -> None:
    """Write the sums over all parts, in the dtype of what they are the gradients of."""
    for total, result in zip(sums, found, strict=True):
        result.copy_(total.sum(0))


def _backward_shapes(grad: Tensor, output: Tensor, log_mass: Tensor, slope: Tensor, *arguments: Any) -> list[Tensor]:
    """A gradient for each of `DIFFERENTIABLE`; empty for arguments that are None."""
    tensors = [arguments[place] for place in DIFFERENTIABLE]
    return [grad.new_empty(0) if x is None else x.new_empty(x.shape) for x in tensors]


def saving(tensors: int) -> Callable[[Any, tuple[Any, ...], tuple[Tensor, ...]], None]:
    """Keeps the first so many arguments and all outputs for the backward pass; only the first output has gradients."""

    def save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.save_for_backward(*inputs[:tensors], *output)
        ctx.numbers = inputs[tensors:]
        ctx.mark_non_differentiable(*output[1:])

    return save


def _differentiate(ctx: Any, grad: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
    tensors = ctx.saved_tensors
    found = near_heavy_means_backward(grad, *tensors[TENSORS:], *tensors[:TENSORS], *ctx.numbers)
    gradients: list[Tensor | None] = [None] * (TENSORS + len(ctx.numbers))
    for place, gradient in zip(DIFFERENTIABLE, found, strict=True):
        if tensors[place] is not None:
            gradients[place] = gradient
    return tuple(gradients)


near_heavy_means = torch.library.custom_op(
    "fewkeys::near_heavy_means", _forward, mutates_args=(), schema=f"({_ARGUMENTS}) -> (Tensor, Tensor, Tensor)"
)
"""The softmax of the band, the shared list and the stand-ins: outputs, log2 of the rows' sums, slopes of the rows.

Only the outputs have gradients, and these have none. `mean_total` (B, Hkv, C) and `share` count keys; counts carry no
gradient.
"""
near_heavy_means_backward = torch.library.custom_op(
    "fewkeys::near_heavy_means_backward",
    _backward,
    mutates_args=(),
    schema=f"(Tensor grad, Tensor output, Tensor log_mass, Tensor slope, {_ARGUMENTS}) -> Tensor[]",
)
near_heavy_means.register_fake(_forward_shapes)
near_heavy_means_backward.register_fake(_backward_shapes)
near_heavy_means.register_autograd(_differentiate, setup_context=saving(TENSORS))
