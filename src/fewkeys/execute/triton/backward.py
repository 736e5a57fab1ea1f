"""The gradients of `forward.attend_rows`, from recomputed weights.

With `A` the weights of a row, `g` the gradient of its output o and `delta = g . o`, the gradient of a score is
`A (g . v - delta)`. For stand-ins `g . v_c` gains `factor_c lift`, where `lift = (scale q left) . (g right^T)` is the
gradient of the row's slope. Counts carry no gradient.

Every gradient has one program that sums it in a fixed order; what all queries share is summed by several programs, each
over a part of the queries, into buffers that the caller adds up. So results do not change from run to run.
"""

# Kernels are compiled from their source: Triton, which ships no types, gives the meaning of what they take.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

import triton
import triton.language as tl

from fewkeys.execute.triton.forward import (
    band_keys,
    band_scores,
    key_bases,
    list_scores,
    mean_scores,
    query_base,
    unkept,
)
from fewkeys.sketch.triton.tiles import dot, load_rows, store_rows


@triton.jit
def load_column(base, row, rows, other: tl.constexpr):
    """One number per row."""
    return tl.load(base + row, mask=row < rows, other=other)


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
    d = tl.arange(0, BLOCK_D)
    dv = tl.arange(0, BLOCK_V)
    q = load_rows(query_base(near, sizes, head), row, sizes.queries, near.query_strides[2], d, D)
    g = load_rows(grad + head * sizes.queries * DV, row, sizes.queries, DV, dv, DV)
    o = load_rows(output + head * sizes.queries * DV, row, sizes.queries, DV, dv, DV)
    row_mass = load_column(log_mass + head * sizes.queries, row, sizes.queries, float("inf"))
    row_delta = tl.sum(g.to(tl.float32) * o.to(tl.float32), 1)
    tl.store(delta + head * sizes.queries + row, row_delta, mask=row < sizes.queries)
    total = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    row_lift = tl.zeros((BLOCK_M,), tl.float32)
    if RANK > 0:
        r = tl.arange(0, BLOCK_R)
        left = load_rows(means.left + shared * D * RANK, d, D, RANK, r, RANK)
        right = load_rows(means.right + shared * RANK * DV, r, RANK, DV, dv, DV)
        back = dot(g, tl.trans(right), PRECISION)
        row_lift = tl.sum(dot(q, left, PRECISION) * scale * back, 1)
        tl.store(lift + head * sizes.queries + row, row_lift, mask=row < sizes.queries)
        row_slope = load_column(slope + head * sizes.queries, row, sizes.queries, 0.0)
        total += dot((row_slope[:, None] * back).to(q.dtype), tl.trans(left), PRECISION)

    key, value = key_bases(near, sizes, shared)
    first, last = band_keys(first_row, tl.minimum(first_row + BLOCK_M, sizes.queries) - 1, sizes)
    for start in range(first, last, BLOCK_N):
        place = start + tl.arange(0, BLOCK_N)
        k = load_rows(key, place, sizes.keys, near.key_strides[2], d, D)
        v = load_rows(value, place, sizes.keys, near.value_strides[2], dv, DV)
        scores = band_scores(q, k, position, place, shared, near, sizes, scale, PRECISION)
        _weight, pulled = pull(scores, row_mass, row_delta, dot(g, tl.trans(v), PRECISION))
        total += dot(pulled.to(k.dtype), k, PRECISION)
    if listed.key is not None:
        for start in range(0, sizes.entries, BLOCK_N):
            entry = start + tl.arange(0, BLOCK_N)
            k = load_rows(listed.key + shared * sizes.entries * D, entry, sizes.entries, D, d, D)
            v = load_rows(listed.value + shared * sizes.entries * DV, entry, sizes.entries, DV, dv, DV)
            scores = list_scores(q, k, position, entry, shared, listed, sizes, scale, CAUSAL, PRECISION)
            _weight, pulled = pull(scores, row_mass, row_delta, dot(g, tl.trans(v), PRECISION))
            total += dot(pulled.to(k.dtype), k, PRECISION)
    if means.key is not None:
        for start in range(0, sizes.means, BLOCK_N):
            entry = start + tl.arange(0, BLOCK_N)
            k = load_rows(means.key + shared * sizes.means * D, entry, sizes.means, D, d, D)
            v = load_rows(means.value + shared * sizes.means * DV, entry, sizes.means, DV, dv, DV)
            count = unkept(position, entry, first, last, shared, means, sizes, BLOCK_M, BLOCK_N)
            scores = mean_scores(q, k, entry, count, shared, means, sizes, scale, PRECISION)
            gain = dot(g, tl.trans(v), PRECISION)
            if RANK > 0:
                factor = load_column(means.factor + shared * sizes.means, entry, sizes.means, 0.0)
                gain += row_lift[:, None] * factor[None, :]
            _weight, pulled = pull(scores, row_mass, row_delta, gain)
            total += dot(pulled.to(k.dtype), k, PRECISION)
    store_rows(grad_query + head * sizes.queries * D, row, sizes.queries, D, d, D, total * scale)


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
    d = tl.arange(0, BLOCK_D)
    dv = tl.arange(0, BLOCK_V)
    key, value = key_bases(near, sizes, shared)
    k = load_rows(key, place, sizes.keys, near.key_strides[2], d, D)
    v = load_rows(value, place, sizes.keys, near.value_strides[2], dv, DV)
    total_key = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    total_value = tl.zeros((BLOCK_N, BLOCK_V), tl.float32)
    first = tl.maximum(first_place - sizes.band_right - sizes.offset, 0)
    last = tl.minimum(first_place + BLOCK_N + sizes.band_left - sizes.offset, sizes.queries)
    for group in range(sizes.groups):
        head = shared * sizes.groups + group
        query = query_base(near, sizes, head)
        for start in range(first, last, BLOCK_M):
            row = start + tl.arange(0, BLOCK_M)
            q = load_rows(query, row, sizes.queries, near.query_strides[2], d, D)
            g = load_rows(grad + head * sizes.queries * DV, row, sizes.queries, DV, dv, DV)
            row_mass = load_column(log_mass + head * sizes.queries, row, sizes.queries, float("inf"))
            row_delta = load_column(delta + head * sizes.queries, row, sizes.queries, 0.0)
            scores = band_scores(q, k, row + sizes.offset, place, shared, near, sizes, scale, PRECISION)
            weight, pulled = pull(scores, row_mass, row_delta, dot(g, tl.trans(v), PRECISION))
            total_value += dot(tl.trans(weight.to(g.dtype)), g, PRECISION)
            total_key += dot(tl.trans(pulled.to(q.dtype)), q, PRECISION)
    store_rows(grad_key + shared * sizes.keys * D, place, sizes.keys, D, d, D, total_key * scale)
    store_rows(grad_value + shared * sizes.keys * DV, place, sizes.keys, DV, dv, DV, total_value)


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
    d = tl.arange(0, BLOCK_D)
    dv = tl.arange(0, BLOCK_V)
    k = load_rows(source.key + shared * entries * D, entry, entries, D, d, D)
    v = load_rows(source.value + shared * entries * DV, entry, entries, DV, dv, DV)
    total_key = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    total_value = tl.zeros((BLOCK_N, BLOCK_V), tl.float32)
    total_bias = tl.zeros((BLOCK_N,), tl.float32)
    total_factor = tl.zeros((BLOCK_N,), tl.float32)
    if RANK > 0:
        factor = load_column(means.factor + shared * entries, entry, entries, 0.0)
    per_head = tl.cdiv(sizes.queries, BLOCK_M)
    for tile in range(part * tiles, tl.minimum((part + 1) * tiles, per_head * sizes.groups)):
        head = shared * sizes.groups + tile // per_head
        first_row = tile % per_head * BLOCK_M
        row = first_row + tl.arange(0, BLOCK_M)
        position = row + sizes.offset
        q = load_rows(query_base(near, sizes, head), row, sizes.queries, near.query_strides[2], d, D)
        g = load_rows(grad + head * sizes.queries * DV, row, sizes.queries, DV, dv, DV)
        row_mass = load_column(log_mass + head * sizes.queries, row, sizes.queries, float("inf"))
        row_delta = load_column(delta + head * sizes.queries, row, sizes.queries, 0.0)
        gain = dot(g, tl.trans(v), PRECISION)
        if COUNTED:
            first, last = band_keys(first_row, tl.minimum(first_row + BLOCK_M, sizes.queries) - 1, sizes)
            count = unkept(position, entry, first, last, shared, means, sizes, BLOCK_M, BLOCK_N)
            scores = mean_scores(q, k, entry, count, shared, means, sizes, scale, PRECISION)
        else:
            scores = list_scores(q, k, position, entry, shared, listed, sizes, scale, CAUSAL, PRECISION)
        if RANK > 0:
            row_lift = load_column(lift + head * sizes.queries, row, sizes.queries, 0.0)
            gain += row_lift[:, None] * factor[None, :]
        weight, pulled = pull(scores, row_mass, row_delta, gain)
        total_value += dot(tl.trans(weight.to(g.dtype)), g, PRECISION)
        total_key += dot(tl.trans(pulled.to(q.dtype)), q, PRECISION)
        if COUNTED:
            total_bias += tl.sum(pulled, 0)
        if RANK > 0:
            total_factor += tl.sum(weight * row_lift[:, None], 0)
    place = (part * tl.num_programs(2) + shared) * entries
    store_rows(grad_key + place * D, entry, entries, D, d, D, total_key * scale)
    store_rows(grad_value + place * DV, entry, entries, DV, dv, DV, total_value)
    if COUNTED:
        tl.store(grad_bias + place + entry, total_bias, mask=entry < entries)
    if RANK > 0:
        tl.store(grad_factor + place + entry, total_factor, mask=entry < entries)


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
    d = tl.arange(0, BLOCK_D)
    dv = tl.arange(0, BLOCK_V)
    r = tl.arange(0, BLOCK_R)
    left = load_rows(means.left + shared * D * RANK, d, D, RANK, r, RANK)
    right = load_rows(means.right + shared * RANK * DV, r, RANK, DV, dv, DV)
    total_left = tl.zeros((BLOCK_D, BLOCK_R), tl.float32)
    total_right = tl.zeros((BLOCK_R, BLOCK_V), tl.float32)
    per_head = tl.cdiv(sizes.queries, BLOCK_M)
    for tile in range(part * tiles, tl.minimum((part + 1) * tiles, per_head * sizes.groups)):
        head = shared * sizes.groups + tile // per_head
        row = tile % per_head * BLOCK_M + tl.arange(0, BLOCK_M)
        q = load_rows(query_base(near, sizes, head), row, sizes.queries, near.query_strides[2], d, D)
        g = load_rows(grad + head * sizes.queries * DV, row, sizes.queries, DV, dv, DV)
        row_slope = load_column(slope + head * sizes.queries, row, sizes.queries, 0.0)[:, None] * scale
        along = (row_slope * dot(q, left, PRECISION)).to(g.dtype)
        back = (row_slope * dot(g, tl.trans(right), PRECISION)).to(q.dtype)
        total_right += dot(tl.trans(along), g, PRECISION)
        total_left += dot(tl.trans(q), back, PRECISION)
    place = part * tl.num_programs(1) + shared
    store_rows(grad_left + place * D * RANK, d, D, RANK, r, RANK, total_left)
    store_rows(grad_right + place * RANK * DV, r, RANK, DV, dv, DV, total_right)
