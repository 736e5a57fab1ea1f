"""The gradients of `grouped_forward.attend_groups`, from recomputed weights.

With `A` the weights of a row, `u = A^(2 - alpha)` on their support (softmax: `u = A`), g the gradient of the row's
output and `gain_j = g . v_j`, the gradient of a score is `u_j (gain_j - delta)`, `delta = sum u gain / sum u`.

Keys of a group are gathered by tiles of it, one query head at a time; what the band adds to a tile of consecutive keys
is joined to the sum over the query heads. The list is summed by several programs, each over a part of the queries,
into buffers that the caller adds up. Every sum has a fixed order, so results do not change from run to run.
"""

# Kernels are compiled from their source: Triton, which ships no types, gives the meaning of what they take.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

import triton
import triton.language as tl

from fewkeys.execute.triton.backward import load_column
from fewkeys.execute.triton.forward import in_band, key_bases, query_base
from fewkeys.execute.triton.grouped_forward import (
    key_places,
    near_places,
    near_scores,
    raised,
    tile_of,
    tile_scores,
    tokens_at,
)
from fewkeys.sketch.triton.tiles import dot, load_rows, store_rows


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
    d = tl.arange(0, BLOCK_D)
    dv = tl.arange(0, BLOCK_V)
    q = load_rows(query_base(near, sizes, head), row, sizes.queries, near.query_strides[2], d, D)
    g = load_rows(grad + head * sizes.queries * DV, row, sizes.queries, DV, dv, DV)
    row_level = load_column(level + head * sizes.queries, row, sizes.queries, 0.0)
    row_share = load_column(share + head * sizes.queries, row, sizes.queries, 0.0)
    key, value = key_bases(near, sizes, shared)
    if ALPHA > 1:
        along = tl.zeros((BLOCK_M,), tl.float32)
        mass = tl.zeros((BLOCK_M,), tl.float32)
        for start in range(0, end - begin + sizes.entries, BLOCK_N):
            place = key_places(start + tl.arange(0, BLOCK_N), begin, end, group, head, shared, members, sizes)
            k = load_rows(key, place, sizes.keys, near.key_strides[2], d, D)
            v = load_rows(value, place, sizes.keys, near.value_strides[2], dv, DV)
            scores = tile_scores(q, k, position, place, sizes, factor, CAUSAL, PRECISION)
            _weight, slope = weigh(scores, row_level[:, None], row_share[:, None], ALPHA)
            along += tl.sum(slope * dot(g, tl.trans(v), PRECISION), 1)
            mass += tl.sum(slope, 1)
        if BAND:
            for shift in range(-sizes.band_left, sizes.band_right + 1):
                place = near_places(position, shift, group, head, shared, near, members, sizes)
                k = load_rows(key, place, sizes.keys, near.key_strides[2], d, D)
                v = load_rows(value, place, sizes.keys, near.value_strides[2], dv, DV)
                _weight, slope = weigh(near_scores(q, k, place, sizes, factor), row_level, row_share, ALPHA)
                along += slope * tl.sum(g.to(tl.float32) * v.to(tl.float32), 1)
                mass += slope
        row_delta = along / tl.where(mass > 0, mass, 1.0)
    else:
        o = load_rows(output + head * sizes.queries * DV, row, sizes.queries, DV, dv, DV)
        row_delta = tl.sum(g.to(tl.float32) * o.to(tl.float32), 1)
    tl.store(delta + head * sizes.queries + row, row_delta, mask=row < sizes.queries)

    total = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    for start in range(0, end - begin + sizes.entries, BLOCK_N):
        place = key_places(start + tl.arange(0, BLOCK_N), begin, end, group, head, shared, members, sizes)
        k = load_rows(key, place, sizes.keys, near.key_strides[2], d, D)
        v = load_rows(value, place, sizes.keys, near.value_strides[2], dv, DV)
        scores = tile_scores(q, k, position, place, sizes, factor, CAUSAL, PRECISION)
        _weight, slope = weigh(scores, row_level[:, None], row_share[:, None], ALPHA)
        pulled = slope * (dot(g, tl.trans(v), PRECISION) - row_delta[:, None])
        total += dot(pulled.to(k.dtype), k, PRECISION)
    if BAND:
        for shift in range(-sizes.band_left, sizes.band_right + 1):
            place = near_places(position, shift, group, head, shared, near, members, sizes)
            k = load_rows(key, place, sizes.keys, near.key_strides[2], d, D)
            v = load_rows(value, place, sizes.keys, near.value_strides[2], dv, DV)
            _weight, slope = weigh(near_scores(q, k, place, sizes, factor), row_level, row_share, ALPHA)
            pulled = slope * (tl.sum(g.to(tl.float32) * v.to(tl.float32), 1) - row_delta)
            total += pulled[:, None] * k.to(tl.float32)
    store_rows(grad_query + head * sizes.queries * D, row, sizes.queries, D, d, D, total * scale)


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
    row_level = load_column(level + head * sizes.queries, row, sizes.queries, 0.0)
    row_share = load_column(share + head * sizes.queries, row, sizes.queries, 0.0)
    row_delta = load_column(delta + head * sizes.queries, row, sizes.queries, 0.0)
    scores = tl.where(seen, dot(q, tl.trans(k), PRECISION) * factor, float("-inf"))
    weight, slope = weigh(scores, row_level[:, None], row_share[:, None], ALPHA)
    pulled = slope * (dot(g, tl.trans(v), PRECISION) - row_delta[:, None])
    to_key = dot(tl.trans(pulled.to(q.dtype)), q, PRECISION)
    return to_key, dot(tl.trans(weight.to(g.dtype)), g, PRECISION)


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
    d = tl.arange(0, BLOCK_D)
    dv = tl.arange(0, BLOCK_V)
    key, value = key_bases(near, sizes, head // sizes.groups)
    query = query_base(near, sizes, head)
    k = load_rows(key, place, sizes.keys, near.key_strides[2], d, D)
    v = load_rows(value, place, sizes.keys, near.value_strides[2], dv, DV)
    total_key = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    total_value = tl.zeros((BLOCK_N, BLOCK_V), tl.float32)
    for start in range(begin, end, BLOCK_M):
        row = tokens_at(members.query_order, start + tl.arange(0, BLOCK_M), end, head, sizes.queries)
        q = load_rows(query, row, sizes.queries, near.query_strides[2], d, D)
        g = load_rows(grad + head * sizes.queries * DV, row, sizes.queries, DV, dv, DV)
        seen = (place < sizes.keys)[None, :]
        if CAUSAL:
            seen = seen & (place[None, :] <= (row + sizes.offset)[:, None])
        to_key, to_value = pull_back(q, g, k, v, seen, row, head, sizes, factor, level, share, delta, ALPHA, PRECISION)
        total_key += to_key
        total_value += to_value
    store_rows(sum_key + head * sizes.keys * D, place, sizes.keys, D, d, D, total_key * scale)
    store_rows(sum_value + head * sizes.keys * DV, place, sizes.keys, DV, dv, DV, total_value)


@triton.jit
def apart(row, place, head, members, sizes):
    """Which queries `row` (M) and keys `place` (N) of a head share no group: (M, N)."""
    query_group = load_column(members.query_group + head * sizes.queries, row, sizes.queries, -1)
    key_group = load_column(members.key_group + head * sizes.keys, place, sizes.keys, -1)
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
    d = tl.arange(0, BLOCK_D)
    dv = tl.arange(0, BLOCK_V)
    key, value = key_bases(near, sizes, shared)
    k = load_rows(key, place, sizes.keys, near.key_strides[2], d, D)
    v = load_rows(value, place, sizes.keys, near.value_strides[2], dv, DV)
    free = place < sizes.keys
    if near.hidden is not None:
        free = load_column(near.hidden + shared * sizes.keys, place, sizes.keys, 1) == 0
    total_key = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    total_value = tl.zeros((BLOCK_N, BLOCK_V), tl.float32)
    first = tl.maximum(first_place - sizes.band_right - sizes.offset, 0)
    last = tl.minimum(first_place + BLOCK_N + sizes.band_left - sizes.offset, sizes.queries)
    for own in range(sizes.groups):
        head = shared * sizes.groups + own
        query = query_base(near, sizes, head)
        for start in range(first, last, BLOCK_M):
            row = start + tl.arange(0, BLOCK_M)
            q = load_rows(query, row, sizes.queries, near.query_strides[2], d, D)
            g = load_rows(grad + head * sizes.queries * DV, row, sizes.queries, DV, dv, DV)
            seen = in_band(row + sizes.offset, place, sizes) & apart(row, place, head, members, sizes) & free[None, :]
            to_key, to_value = pull_back(
                q, g, k, v, seen, row, head, sizes, factor, level, share, delta, ALPHA, PRECISION
            )
            total_key += to_key * scale
            total_value += to_value
        total_key += load_rows(sum_key + head * sizes.keys * D, place, sizes.keys, D, d, D)
        total_value += load_rows(sum_value + head * sizes.keys * DV, place, sizes.keys, DV, dv, DV)
    store_rows(grad_key + shared * sizes.keys * D, place, sizes.keys, D, d, D, total_key)
    store_rows(grad_value + shared * sizes.keys * DV, place, sizes.keys, DV, dv, DV, total_value)


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
    place = load_column(members.listed + shared * sizes.entries, entry, sizes.entries, sizes.keys)
    d = tl.arange(0, BLOCK_D)
    dv = tl.arange(0, BLOCK_V)
    key, value = key_bases(near, sizes, shared)
    k = load_rows(key, place, sizes.keys, near.key_strides[2], d, D)
    v = load_rows(value, place, sizes.keys, near.value_strides[2], dv, DV)
    total_key = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    total_value = tl.zeros((BLOCK_N, BLOCK_V), tl.float32)
    per_head = tl.cdiv(sizes.queries, BLOCK_M)
    for tile in range(part * tiles, tl.minimum((part + 1) * tiles, per_head * sizes.groups)):
        head = shared * sizes.groups + tile // per_head
        row = tile % per_head * BLOCK_M + tl.arange(0, BLOCK_M)
        q = load_rows(query_base(near, sizes, head), row, sizes.queries, near.query_strides[2], d, D)
        g = load_rows(grad + head * sizes.queries * DV, row, sizes.queries, DV, dv, DV)
        seen = apart(row, place, head, members, sizes) & (place < sizes.keys)[None, :]
        if CAUSAL:
            seen = seen & (place[None, :] <= (row + sizes.offset)[:, None])
        to_key, to_value = pull_back(q, g, k, v, seen, row, head, sizes, factor, level, share, delta, ALPHA, PRECISION)
        total_key += to_key
        total_value += to_value
    at = (part * tl.num_programs(2) + shared) * sizes.entries
    store_rows(sum_key + at * D, entry, sizes.entries, D, d, D, total_key * scale)
    store_rows(sum_value + at * DV, entry, sizes.entries, DV, dv, DV, total_value)
