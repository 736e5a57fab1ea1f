"""The gradients of `grouped_forward.attend_groups`, from recomputed weights.

With `A` the weights of a row, `u = A^(2 - alpha)` on their support (softmax: `u = A`), g the gradient of the row's
output and `gain_j = g . v_j`, the gradient of a score is `u_j (gain_j - delta)`, `delta = sum u gain / sum u`.

Keys of a group are gathered by tiles of it, one query head at a time; what the band adds to a tile of consecutive keys
is joined to the sum over the query heads. The list is summed by several programs, each over a part of the queries,
into buffers that the caller adds up. Every sum has a fixed order, so results do not change from run to run.

Experimental: run in Triton's interpreter, and on no device yet.
"""

# Kernels are compiled from their source: Triton, which ships no types, gives the meaning of what they take.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

import triton
import triton.language as tl

from fewkeys.execute.triton.grouped_forward import near_tile, raised, sequence_tile, tile_of, tokens_at
from fewkeys.execute.triton.tiles import (
    band_queries,
    gradients_of,
    in_band,
    load_column,
    load_dense,
    load_keys,
    load_queries,
    load_values,
    scores_of,
    store_column,
    store_dense,
    visible,
)
from fewkeys.sketch.triton.tiles import dot


@triton.jit
def weigh(scores, level, share, ALPHA: tl.constexpr):
    """Weights A, and their slopes u."""
    if ALPHA > 1:
        weight = raised(tl.maximum(scores - level, 0.0), 1 / (ALPHA - 1)) * share
        return weight, raised(weight, 2 - ALPHA)
    else:
        weight = tl.exp2(scores - level) * share
        return weight, weight


@triton.jit
def query_gradients(
    near,
    members,
    tiles,
    sizes,
    factor,
    scale,
    output,
    level,
    share,
    grad,
    delta,
    grad_query,
    ALPHA: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    CAUSAL: tl.constexpr,
    BAND: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Gradients of a tile of queries; also `delta` of every row, which the other kernels read."""
    head = tl.program_id(1).to(tl.int64)
    shared = head // sizes.groups
    group, first, last, begin, end = tile_of(tiles, head)
    if first >= last:
        return
    row = tokens_at(members.query_order, first + tl.arange(0, BLOCK_M), last, head, sizes.queries)
    position = row + sizes.offset
    q = load_queries(near, sizes, head, row, BLOCK_D, D)
    g = load_dense(grad, head, row, sizes.queries, BLOCK_V, DV)
    row_level = load_column(level, head, row, sizes.queries, 0.0)
    row_share = load_column(share, head, row, sizes.queries, 0.0)
    if ALPHA > 1:
        along = tl.zeros((BLOCK_M,), tl.float32)
        mass = tl.zeros((BLOCK_M,), tl.float32)
        for start in range(0, end - begin + sizes.entries, BLOCK_N):
            place, _k, scores = sequence_tile(
                start,
                q,
                position,
                begin,
                end,
                group,
                head,
                near,
                members,
                sizes,
                factor,
                D,
                CAUSAL,
                BLOCK_N,
                BLOCK_D,
                PRECISION,
            )
            v = load_values(near, sizes, shared, place, BLOCK_V, DV)
            _weight, slope = weigh(scores, row_level[:, None], row_share[:, None], ALPHA)
            along += tl.sum(slope * dot(g, tl.trans(v), PRECISION), 1)
            mass += tl.sum(slope, 1)
        if BAND:
            for shift in range(-sizes.band_left, sizes.band_right + 1):
                place, _k, scores = near_tile(shift, q, position, group, head, near, members, sizes, factor, D, BLOCK_D)
                v = load_values(near, sizes, shared, place, BLOCK_V, DV)
                _weight, slope = weigh(scores, row_level, row_share, ALPHA)
                along += slope * tl.sum(g.to(tl.float32) * v.to(tl.float32), 1)
                mass += slope
        row_delta = along / tl.where(mass > 0, mass, 1.0)
    else:
        o = load_dense(output, head, row, sizes.queries, BLOCK_V, DV)
        row_delta = tl.sum(g.to(tl.float32) * o.to(tl.float32), 1)
    store_column(delta, head, row, sizes.queries, row_delta)

    total = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    for start in range(0, end - begin + sizes.entries, BLOCK_N):
        place, k, scores = sequence_tile(
            start,
            q,
            position,
            begin,
            end,
            group,
            head,
            near,
            members,
            sizes,
            factor,
            D,
            CAUSAL,
            BLOCK_N,
            BLOCK_D,
            PRECISION,
        )
        v = load_values(near, sizes, shared, place, BLOCK_V, DV)
        _weight, slope = weigh(scores, row_level[:, None], row_share[:, None], ALPHA)
        pulled = slope * (dot(g, tl.trans(v), PRECISION) - row_delta[:, None])
        total += dot(pulled.to(k.dtype), k, PRECISION)
    if BAND:
        for shift in range(-sizes.band_left, sizes.band_right + 1):
            place, k, scores = near_tile(shift, q, position, group, head, near, members, sizes, factor, D, BLOCK_D)
            v = load_values(near, sizes, shared, place, BLOCK_V, DV)
            _weight, slope = weigh(scores, row_level, row_share, ALPHA)
            pulled = slope * (tl.sum(g.to(tl.float32) * v.to(tl.float32), 1) - row_delta)
            total += pulled[:, None] * k.to(tl.float32)
    store_dense(grad_query, head, row, sizes.queries, total * scale, BLOCK_D, D)


@triton.jit
def pull_back(
    q,
    g,
    k,
    v,
    seen,
    row,
    head,
    sizes,
    factor,
    level,
    share,
    delta,
    ALPHA: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """What a tile of queries adds to the gradients of the keys (over `scale`) and values of a tile."""
    row_level = load_column(level, head, row, sizes.queries, 0.0)
    row_share = load_column(share, head, row, sizes.queries, 0.0)
    row_delta = load_column(delta, head, row, sizes.queries, 0.0)
    weight, slope = weigh(scores_of(q, k, seen, factor, PRECISION), row_level[:, None], row_share[:, None], ALPHA)
    pulled = slope * (dot(g, tl.trans(v), PRECISION) - row_delta[:, None])
    return gradients_of(weight, pulled, q, g, PRECISION)


@triton.jit
def group_gradients(
    near,
    members,
    tiles,
    sizes,
    factor,
    scale,
    level,
    share,
    grad,
    delta,
    sum_key,
    sum_value,
    ALPHA: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    CAUSAL: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Gradients of a tile of one group's keys and values, from the group's queries `begin .. end - 1` of one head.

    `sum_key` (B, Hq, Nk, D) and `sum_value` (B, Hq, Nk, Dv), float32; zeros for keys of no group.
    """
    head = tl.program_id(1).to(tl.int64)
    _group, first, last, begin, end = tile_of(tiles, head)
    if first >= last:
        return
    place = tokens_at(members.key_order, first + tl.arange(0, BLOCK_N), last, head, sizes.keys)
    k = load_keys(near, sizes, head // sizes.groups, place, BLOCK_D, D)
    v = load_values(near, sizes, head // sizes.groups, place, BLOCK_V, DV)
    total_key = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    total_value = tl.zeros((BLOCK_N, BLOCK_V), tl.float32)
    for start in range(begin, end, BLOCK_M):
        row = tokens_at(members.query_order, start + tl.arange(0, BLOCK_M), end, head, sizes.queries)
        q = load_queries(near, sizes, head, row, BLOCK_D, D)
        g = load_dense(grad, head, row, sizes.queries, BLOCK_V, DV)
        seen = visible(row + sizes.offset, place, sizes, CAUSAL)
        to_key, to_value = pull_back(q, g, k, v, seen, row, head, sizes, factor, level, share, delta, ALPHA, PRECISION)
        total_key += to_key
        total_value += to_value
    store_dense(sum_key, head, place, sizes.keys, total_key * scale, BLOCK_D, D)
    store_dense(sum_value, head, place, sizes.keys, total_value, BLOCK_V, DV)


@triton.jit
def apart(row, place, head, members, sizes):
    """Which queries `row` (M) and keys `place` (N) of a head share no group: (M, N)."""
    query_group = load_column(members.query_group, head, row, sizes.queries, -1)
    key_group = load_column(members.key_group, head, place, sizes.keys, -1)
    return (query_group[:, None] != key_group[None, :]) | (query_group < 0)[:, None]


@triton.jit
def band_gradients(
    near,
    members,
    sizes,
    factor,
    scale,
    level,
    share,
    grad,
    delta,
    sum_key,
    sum_value,
    grad_key,
    grad_value,
    ALPHA: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Gradients of a tile of consecutive keys and values: the sums of all their query heads, and what the band adds."""
    first_place = tl.program_id(0) * BLOCK_N
    shared = tl.program_id(1).to(tl.int64)
    place = first_place + tl.arange(0, BLOCK_N)
    k = load_keys(near, sizes, shared, place, BLOCK_D, D)
    v = load_values(near, sizes, shared, place, BLOCK_V, DV)
    free = place < sizes.keys
    if near.hidden is not None:
        free = load_column(near.hidden, shared, place, sizes.keys, 1) == 0
    total_key = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    total_value = tl.zeros((BLOCK_N, BLOCK_V), tl.float32)
    first, last = band_queries(first_place, sizes, BLOCK_N)
    for own in range(sizes.groups):
        head = shared * sizes.groups + own
        for start in range(first, last, BLOCK_M):
            row = start + tl.arange(0, BLOCK_M)
            q = load_queries(near, sizes, head, row, BLOCK_D, D)
            g = load_dense(grad, head, row, sizes.queries, BLOCK_V, DV)
            seen = in_band(row + sizes.offset, place, sizes) & apart(row, place, head, members, sizes) & free[None, :]
            to_key, to_value = pull_back(
                q, g, k, v, seen, row, head, sizes, factor, level, share, delta, ALPHA, PRECISION
            )
            total_key += to_key * scale
            total_value += to_value
        total_key += load_dense(sum_key, head, place, sizes.keys, BLOCK_D, D)
        total_value += load_dense(sum_value, head, place, sizes.keys, BLOCK_V, DV)
    store_dense(grad_key, shared, place, sizes.keys, total_key, BLOCK_D, D)
    store_dense(grad_value, shared, place, sizes.keys, total_value, BLOCK_V, DV)


@triton.jit
def list_gradients(
    near,
    members,
    sizes,
    factor,
    scale,
    level,
    share,
    grad,
    delta,
    tiles,
    sum_key,
    sum_value,
    ALPHA: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    CAUSAL: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Gradients of a tile of the shared list, from `tiles` of the tiles of queries that are in other groups.

    Outputs are (parts, batch x key heads, entries, ...), to be summed over the parts; zeros for fillings.
    """
    part = tl.program_id(1)
    shared = tl.program_id(2).to(tl.int64)
    entry = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    place = load_column(members.listed, shared, entry, sizes.entries, sizes.keys)
    k = load_keys(near, sizes, shared, place, BLOCK_D, D)
    v = load_values(near, sizes, shared, place, BLOCK_V, DV)
    total_key = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    total_value = tl.zeros((BLOCK_N, BLOCK_V), tl.float32)
    per_head = tl.cdiv(sizes.queries, BLOCK_M)
    for tile in range(part * tiles, tl.minimum((part + 1) * tiles, per_head * sizes.groups)):
        head = shared * sizes.groups + tile // per_head
        row = tile % per_head * BLOCK_M + tl.arange(0, BLOCK_M)
        q = load_queries(near, sizes, head, row, BLOCK_D, D)
        g = load_dense(grad, head, row, sizes.queries, BLOCK_V, DV)
        seen = apart(row, place, head, members, sizes) & visible(row + sizes.offset, place, sizes, CAUSAL)
        to_key, to_value = pull_back(q, g, k, v, seen, row, head, sizes, factor, level, share, delta, ALPHA, PRECISION)
        total_key += to_key
        total_value += to_value
    at = part * tl.num_programs(2) + shared
    store_dense(sum_key, at, entry, sizes.entries, total_key * scale, BLOCK_D, D)
    store_dense(sum_value, at, entry, sizes.entries, total_value, BLOCK_V, DV)
