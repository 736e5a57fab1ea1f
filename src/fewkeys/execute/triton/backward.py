"""The gradients of `forward.attend_rows`, from recomputed weights.

With `A` the weights of a row, `g` the gradient of its output o and `delta = g . o`, the gradient of a score is
`A (g . v - delta)`. For stand-ins `g . v_c` gains `factor_c lift`, where `lift = (scale q left) . (g right^T)` is the
gradient of the row's slope. Counts carry no gradient.

Every gradient has one program that sums it in a fixed order; what all queries share is summed by several programs, each
over a part of the queries, into buffers that the caller adds up. So results do not change from run to run.

Experimental: run in Triton's interpreter, and on no device yet.
"""

# Kernels are compiled from their source: Triton, which ships no types, gives the meaning of what they take.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

import triton
import triton.language as tl

from fewkeys.execute.triton.forward import BAND, LISTED, MEANS, band_scores, list_scores, mean_scores, part_tile, unkept
from fewkeys.execute.triton.tiles import (
    band_keys,
    band_queries,
    gradients_of,
    load_column,
    load_dense,
    load_keys,
    load_queries,
    load_values,
    store_column,
    store_dense,
)
from fewkeys.sketch.triton.tiles import dot


@triton.jit
def pull(scores, log_mass, delta, gain):
    """Weights (M, N), and the gradients of the scores where the weights' own gradients are `gain`."""
    weight = tl.exp2(scores - log_mass[:, None])
    return weight, weight * (gain - delta[:, None])


@triton.jit
def query_gradients(
    near,
    listed,
    means,
    sizes,
    scale,
    output,
    log_mass,
    slope,
    grad,
    delta,
    lift,
    grad_query,
    D: tl.constexpr,
    DV: tl.constexpr,
    RANK: tl.constexpr,
    CAUSAL: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_R: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Gradients of the queries; also `delta` and `lift` of every row, which the other kernels read."""
    first_row = tl.program_id(0) * BLOCK_M
    head = tl.program_id(1).to(tl.int64)
    shared = head // sizes.groups
    row = first_row + tl.arange(0, BLOCK_M)
    position = row + sizes.offset
    q = load_queries(near, sizes, head, row, BLOCK_D, D)
    g = load_dense(grad, head, row, sizes.queries, BLOCK_V, DV)
    o = load_dense(output, head, row, sizes.queries, BLOCK_V, DV)
    row_mass = load_column(log_mass, head, row, sizes.queries, float("inf"))
    row_delta = tl.sum(g.to(tl.float32) * o.to(tl.float32), 1)
    store_column(delta, head, row, sizes.queries, row_delta)
    total = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    row_lift = tl.zeros((BLOCK_M,), tl.float32)
    if RANK > 0:
        left = load_dense(means.left, shared, tl.arange(0, BLOCK_D), D, BLOCK_R, RANK)
        right = load_dense(means.right, shared, tl.arange(0, BLOCK_R), RANK, BLOCK_V, DV)
        back = dot(g, tl.trans(right), PRECISION)
        row_lift = tl.sum(dot(q, left, PRECISION) * scale * back, 1)
        store_column(lift, head, row, sizes.queries, row_lift)
        row_slope = load_column(slope, head, row, sizes.queries, 0.0)
        total += dot((row_slope[:, None] * back).to(q.dtype), tl.trans(left), PRECISION)

    first, last = band_keys(first_row, sizes, BLOCK_M)
    for start in range(first, last, BLOCK_N):
        _entry, k, v, scores = part_tile(
            start, q, position, first, last, shared, near, listed, means, sizes, scale,
            BAND, D, DV, CAUSAL, BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_V, PRECISION,
        )  # fmt: skip
        _weight, pulled = pull(scores, row_mass, row_delta, dot(g, tl.trans(v), PRECISION))
        total += dot(pulled.to(k.dtype), k, PRECISION)
    if listed.key is not None:
        for start in range(0, sizes.entries, BLOCK_N):
            _entry, k, v, scores = part_tile(
                start, q, position, first, last, shared, near, listed, means, sizes, scale,
                LISTED, D, DV, CAUSAL, BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_V, PRECISION,
            )  # fmt: skip
            _weight, pulled = pull(scores, row_mass, row_delta, dot(g, tl.trans(v), PRECISION))
            total += dot(pulled.to(k.dtype), k, PRECISION)
    if means.key is not None:
        for start in range(0, sizes.means, BLOCK_N):
            entry, k, v, scores = part_tile(
                start, q, position, first, last, shared, near, listed, means, sizes, scale,
                MEANS, D, DV, CAUSAL, BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_V, PRECISION,
            )  # fmt: skip
            gain = dot(g, tl.trans(v), PRECISION)
            if RANK > 0:
                gain += row_lift[:, None] * load_column(means.factor, shared, entry, sizes.means, 0.0)[None, :]
            _weight, pulled = pull(scores, row_mass, row_delta, gain)
            total += dot(pulled.to(k.dtype), k, PRECISION)
    store_dense(grad_query, head, row, sizes.queries, total * scale, BLOCK_D, D)


@triton.jit
def band_gradients(
    near,
    sizes,
    scale,
    log_mass,
    grad,
    delta,
    grad_key,
    grad_value,
    D: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Gradients of a tile of keys and values, from the queries of all groups whose band touches it."""
    first_place = tl.program_id(0) * BLOCK_N
    shared = tl.program_id(1).to(tl.int64)
    place = first_place + tl.arange(0, BLOCK_N)
    k = load_keys(near, sizes, shared, place, BLOCK_D, D)
    v = load_values(near, sizes, shared, place, BLOCK_V, DV)
    total_key = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    total_value = tl.zeros((BLOCK_N, BLOCK_V), tl.float32)
    first, last = band_queries(first_place, sizes, BLOCK_N)
    for group in range(sizes.groups):
        head = shared * sizes.groups + group
        for start in range(first, last, BLOCK_M):
            row = start + tl.arange(0, BLOCK_M)
            q = load_queries(near, sizes, head, row, BLOCK_D, D)
            g = load_dense(grad, head, row, sizes.queries, BLOCK_V, DV)
            row_mass = load_column(log_mass, head, row, sizes.queries, float("inf"))
            row_delta = load_column(delta, head, row, sizes.queries, 0.0)
            scores = band_scores(q, k, row + sizes.offset, place, shared, near, sizes, scale, PRECISION)
            weight, pulled = pull(scores, row_mass, row_delta, dot(g, tl.trans(v), PRECISION))
            to_key, to_value = gradients_of(weight, pulled, q, g, PRECISION)
            total_key += to_key
            total_value += to_value
    store_dense(grad_key, shared, place, sizes.keys, total_key * scale, BLOCK_D, D)
    store_dense(grad_value, shared, place, sizes.keys, total_value, BLOCK_V, DV)


@triton.jit
def shared_gradients(
    near,
    listed,
    means,
    sizes,
    scale,
    log_mass,
    grad,
    delta,
    lift,
    tiles,
    grad_key,
    grad_value,
    grad_bias,
    grad_factor,
    COUNTED: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    RANK: tl.constexpr,
    CAUSAL: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Gradients of a tile of stand-ins (`COUNTED`) or of the shared list, from `tiles` of the tiles of queries.

    Outputs are (parts, batch x key heads, entries, ...), to be summed over the parts.
    """
    part = tl.program_id(1)
    shared = tl.program_id(2).to(tl.int64)
    entry = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    entries = sizes.means if COUNTED else sizes.entries
    source = means if COUNTED else listed
    k = load_dense(source.key, shared, entry, entries, BLOCK_D, D)
    v = load_dense(source.value, shared, entry, entries, BLOCK_V, DV)
    total_key = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    total_value = tl.zeros((BLOCK_N, BLOCK_V), tl.float32)
    total_bias = tl.zeros((BLOCK_N,), tl.float32)
    total_factor = tl.zeros((BLOCK_N,), tl.float32)
    if RANK > 0:
        factor = load_column(means.factor, shared, entry, entries, 0.0)
    per_head = tl.cdiv(sizes.queries, BLOCK_M)
    for tile in range(part * tiles, tl.minimum((part + 1) * tiles, per_head * sizes.groups)):
        head = shared * sizes.groups + tile // per_head
        first_row = tile % per_head * BLOCK_M
        row = first_row + tl.arange(0, BLOCK_M)
        position = row + sizes.offset
        q = load_queries(near, sizes, head, row, BLOCK_D, D)
        g = load_dense(grad, head, row, sizes.queries, BLOCK_V, DV)
        row_mass = load_column(log_mass, head, row, sizes.queries, float("inf"))
        row_delta = load_column(delta, head, row, sizes.queries, 0.0)
        gain = dot(g, tl.trans(v), PRECISION)
        if COUNTED:
            first, last = band_keys(first_row, sizes, BLOCK_M)
            count = unkept(position, entry, first, last, shared, means, sizes, BLOCK_M, BLOCK_N)
            scores = mean_scores(q, k, entry, count, shared, means, sizes, scale, PRECISION)
        else:
            scores = list_scores(q, k, position, entry, shared, listed, sizes, scale, CAUSAL, PRECISION)
        if RANK > 0:
            row_lift = load_column(lift, head, row, sizes.queries, 0.0)
            gain += row_lift[:, None] * factor[None, :]
        weight, pulled = pull(scores, row_mass, row_delta, gain)
        to_key, to_value = gradients_of(weight, pulled, q, g, PRECISION)
        total_key += to_key
        total_value += to_value
        if COUNTED:
            total_bias += tl.sum(pulled, 0)
        if RANK > 0:
            total_factor += tl.sum(weight * row_lift[:, None], 0)
    place = part * tl.num_programs(2) + shared
    store_dense(grad_key, place, entry, entries, total_key * scale, BLOCK_D, D)
    store_dense(grad_value, place, entry, entries, total_value, BLOCK_V, DV)
    if COUNTED:
        store_column(grad_bias, place, entry, entries, total_bias)
    if RANK > 0:
        store_column(grad_factor, place, entry, entries, total_factor)


@triton.jit
def slope_gradients(
    near,
    means,
    sizes,
    scale,
    slope,
    grad,
    tiles,
    grad_left,
    grad_right,
    D: tl.constexpr,
    DV: tl.constexpr,
    RANK: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_R: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Gradients of `left` and `right` from `tiles` of the tiles of queries; outputs (parts, batch x key heads, ...)."""
    part = tl.program_id(0)
    shared = tl.program_id(1).to(tl.int64)
    left = load_dense(means.left, shared, tl.arange(0, BLOCK_D), D, BLOCK_R, RANK)
    right = load_dense(means.right, shared, tl.arange(0, BLOCK_R), RANK, BLOCK_V, DV)
    total_left = tl.zeros((BLOCK_D, BLOCK_R), tl.float32)
    total_right = tl.zeros((BLOCK_R, BLOCK_V), tl.float32)
    per_head = tl.cdiv(sizes.queries, BLOCK_M)
    for tile in range(part * tiles, tl.minimum((part + 1) * tiles, per_head * sizes.groups)):
        head = shared * sizes.groups + tile // per_head
        row = tile % per_head * BLOCK_M + tl.arange(0, BLOCK_M)
        q = load_queries(near, sizes, head, row, BLOCK_D, D)
        g = load_dense(grad, head, row, sizes.queries, BLOCK_V, DV)
        row_slope = load_column(slope, head, row, sizes.queries, 0.0)[:, None] * scale
        along = (row_slope * dot(q, left, PRECISION)).to(g.dtype)
        back = (row_slope * dot(g, tl.trans(right), PRECISION)).to(q.dtype)
        total_right += dot(tl.trans(along), g, PRECISION)
        total_left += dot(tl.trans(q), back, PRECISION)
    place = part * tl.num_programs(1) + shared
    store_dense(grad_left, place, tl.arange(0, BLOCK_D), D, total_left, BLOCK_R, RANK)
    store_dense(grad_right, place, tl.arange(0, BLOCK_R), RANK, total_right, BLOCK_V, DV)
