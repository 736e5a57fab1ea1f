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

from fewkeys.execute.triton.grouped_forward import meet, raised, step_tile, steps, tile_of, tokens_at
from fewkeys.execute.triton.tiles import (
    band_queries,
    gradients_of,
    in_band,
    load_column,
    load_dense,
    load_keys,
    load_queries,
    load_values,
    mix,
    part_of_queries,
    scores_of,
    store_column,
    store_dense,
    store_gradients,
    unhidden,
    visible,
)


@triton.jit
def weigh(scores, level, inverse, ALPHA: tl.constexpr):
    """Weights A, and their slopes u, of scores (M, N)."""
    if ALPHA > 1:
        weight = raised(tl.maximum(scores - level[:, None], 0.0), 1 / (ALPHA - 1)) * inverse[:, None]
        return weight, raised(weight, 2 - ALPHA)
    else:
        weight = tl.exp2(scores - level[:, None]) * inverse[:, None]
        return weight, weight


@triton.jit
def query_gradients(x, tiles, output, level, inverse, grad, delta, grad_query):
    """Gradients of a tile of queries; also `delta` of every row, which the other kernels read."""
    head = tl.program_id(1).to(tl.int64)
    shared = head // x.sizes.gqa_ratio
    group, first, last, begin, end = tile_of(tiles, head)
    if first >= last:
        return
    row = tokens_at(x.members.query_order, first + tl.arange(0, x.made.BLOCK_M), last, head, x.sizes.queries)
    position = row + x.sizes.offset
    q = load_queries(x, head, row)
    g = load_dense(grad, head, row, x.sizes.queries, x.made.BLOCK_V, x.made.DV)
    row_level = load_column(level, head, row, x.sizes.queries, 0.0)
    row_inverse = load_column(inverse, head, row, x.sizes.queries, 0.0)
    if x.made.ALPHA > 1:
        along = tl.zeros((x.made.BLOCK_M,), tl.float32)
        mass = tl.zeros((x.made.BLOCK_M,), tl.float32)
        for NEAR in tl.static_range(1 + x.made.BAND):
            start, stop, step = steps(x, begin, end, NEAR)
            for at in range(start, stop, step):
                place, _k, scores = step_tile(x, at, q, position, begin, end, group, head, NEAR)
                v = load_values(x, shared, place)
                _weight, slope = weigh(scores, row_level, row_inverse, x.made.ALPHA)
                along += tl.sum(slope * meet(x, g, v, NEAR), 1)
                mass += tl.sum(slope, 1)
        row_delta = along / tl.where(mass > 0, mass, 1.0)
    else:
        o = load_dense(output, head, row, x.sizes.queries, x.made.BLOCK_V, x.made.DV)
        row_delta = tl.sum(g.to(tl.float32) * o.to(tl.float32), 1)
    store_column(delta, head, row, x.sizes.queries, row_delta)

    total = tl.zeros((x.made.BLOCK_M, x.made.BLOCK_D), tl.float32)
    for NEAR in tl.static_range(1 + x.made.BAND):
        start, stop, step = steps(x, begin, end, NEAR)
        for at in range(start, stop, step):
            place, k, scores = step_tile(x, at, q, position, begin, end, group, head, NEAR)
            v = load_values(x, shared, place)
            _weight, slope = weigh(scores, row_level, row_inverse, x.made.ALPHA)
            pulled = slope * (meet(x, g, v, NEAR) - row_delta[:, None])
            total += mix(pulled, k, x.made.PRECISION)
    store_dense(grad_query, head, row, x.sizes.queries, total * x.scale, x.made.BLOCK_D, x.made.D)


@triton.jit
def pull_back(x, k, v, seen, row, head, level, inverse, grad, delta):
    """What a tile of queries adds to the gradients of the keys (over `scale`) and values of a tile."""
    q = load_queries(x, head, row)
    g = load_dense(grad, head, row, x.sizes.queries, x.made.BLOCK_V, x.made.DV)
    row_level = load_column(level, head, row, x.sizes.queries, 0.0)
    row_inverse = load_column(inverse, head, row, x.sizes.queries, 0.0)
    row_delta = load_column(delta, head, row, x.sizes.queries, 0.0)
    scores = scores_of(q, k, seen, x.factor, x.made.PRECISION)
    weight, slope = weigh(scores, row_level, row_inverse, x.made.ALPHA)
    pulled = slope * (meet(x, g, v, False) - row_delta[:, None])
    return gradients_of(weight, pulled, q, g, x.made.PRECISION)


@triton.jit
def group_gradients(x, tiles, level, inverse, grad, delta, sum_key, sum_value):
    """Gradients of a tile of one group's keys and values, from the group's queries `begin .. end - 1` of one head.

    `sum_key` (B, Hq, Nk, D) and `sum_value` (B, Hq, Nk, Dv), float32; zeros for keys of no group.
    """
    head = tl.program_id(1).to(tl.int64)
    _group, first, last, begin, end = tile_of(tiles, head)
    if first >= last:
        return
    place = tokens_at(x.members.key_order, first + tl.arange(0, x.made.BLOCK_N), last, head, x.sizes.keys)
    k = load_keys(x, head // x.sizes.gqa_ratio, place)
    v = load_values(x, head // x.sizes.gqa_ratio, place)
    total_key = tl.zeros((x.made.BLOCK_N, x.made.BLOCK_D), tl.float32)
    total_value = tl.zeros((x.made.BLOCK_N, x.made.BLOCK_V), tl.float32)
    for start in range(begin, end, x.made.BLOCK_M):
        row = tokens_at(x.members.query_order, start + tl.arange(0, x.made.BLOCK_M), end, head, x.sizes.queries)
        seen = visible(x, row + x.sizes.offset, place)
        to_key, to_value = pull_back(x, k, v, seen, row, head, level, inverse, grad, delta)
        total_key += to_key
        total_value += to_value
    store_gradients(x, sum_key, sum_value, head, place, x.sizes.keys, total_key * x.scale, total_value)


@triton.jit
def key_gradients(
    x, level, inverse, grad, delta, tiles, sum_key, sum_value, grad_key, grad_value, LISTED: tl.constexpr
):
    """Gradients of a tile of consecutive keys or of the shared list, from queries in other groups.

    The band's keys meet the queries whose band touches the tile; what they had from their groups, the sums of their
    query heads, is joined. The list is met by `tiles` of the tiles of queries: outputs are (parts, batch x key heads,
    entries, ...), to be summed over the parts; zeros for fillings.
    """
    first_entry = tl.program_id(0) * x.made.BLOCK_N
    part = tl.program_id(1)
    shared = tl.program_id(2).to(tl.int64)
    entry = first_entry + tl.arange(0, x.made.BLOCK_N)
    if LISTED:
        place = load_column(x.members.listed, shared, entry, x.sizes.entries, x.sizes.keys)
        first, last, entries = 0, x.sizes.queries, x.sizes.entries
    else:
        place = entry
        first, last = band_queries(x, first_entry)
        entries = x.sizes.keys
    k = load_keys(x, shared, place)
    v = load_values(x, shared, place)
    total_key = tl.zeros((x.made.BLOCK_N, x.made.BLOCK_D), tl.float32)
    total_value = tl.zeros((x.made.BLOCK_N, x.made.BLOCK_V), tl.float32)
    begin, end, per_head = part_of_queries(x, first, last, part, tiles)
    for tile in range(begin, end):
        head = shared * x.sizes.gqa_ratio + tile // per_head
        row = first + tile % per_head * x.made.BLOCK_M + tl.arange(0, x.made.BLOCK_M)
        query_group = load_column(x.members.query_group, head, row, x.sizes.queries, -1)[:, None]
        key_group = load_column(x.members.key_group, head, place, x.sizes.keys, -1)[None, :]
        seen = (query_group != key_group) | (query_group < 0)
        if LISTED:
            seen = seen & visible(x, row + x.sizes.offset, place)
        else:
            seen = seen & in_band(x, row + x.sizes.offset, place) & unhidden(x, shared, place)[None, :]
        to_key, to_value = pull_back(x, k, v, seen, row, head, level, inverse, grad, delta)
        total_key += to_key
        total_value += to_value
    total_key *= x.scale
    if not LISTED:
        for head in range(shared * x.sizes.gqa_ratio, (shared + 1) * x.sizes.gqa_ratio):
            total_key += load_dense(sum_key, head, place, entries, x.made.BLOCK_D, x.made.D)
            total_value += load_dense(sum_value, head, place, entries, x.made.BLOCK_V, x.made.DV)
    at = part * tl.num_programs(2) + shared
    store_gradients(x, grad_key, grad_value, at, entry, entries, total_key, total_value)
