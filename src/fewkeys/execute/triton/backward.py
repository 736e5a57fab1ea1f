"""The gradients of `forward.attend_rows`, from recomputed weights.

With `A` the weights of a row, `g` the gradient of its output o and `delta = g . o`, the gradient of a score is
`A (g . v - delta)`. For stand-ins `g . v_c` gains `factor_c lift`, where
`lift = u . (g right^T)`, u = scale q left within its bounds, is the
gradient of the row's slope. Counts carry no gradient.

Every gradient has one program that sums it in a fixed order; what all queries share is summed by several programs, each
over a part of the queries, into buffers that the caller adds up. So results do not change from run to run.

Experimental: run in Triton's interpreter, and on no device yet.
"""

# Kernels are compiled from their source: Triton, which ships no types, gives the meaning of what they take.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

import triton
import triton.language as tl

from fewkeys.execute.triton.forward import (
    BAND,
    MEANS,
    along_of,
    has_part,
    low_rank,
    part_entries,
    part_rows,
    part_scores,
)
from fewkeys.execute.triton.tiles import (
    band_queries,
    gradients_of,
    load_column,
    load_dense,
    load_queries,
    part_of_queries,
    store_column,
    store_dense,
    store_gradients,
)
from fewkeys.sketch.triton.tiles import dot


@triton.jit
def pull(scores, log_mass, delta, gain):
    """Weights (M, N), and the gradients of the scores where the weights' own gradients are `gain`."""
    weight = tl.exp2(scores - log_mass[:, None])
    return weight, weight * (gain - delta[:, None])


@triton.jit
def query_gradients(x, output, log_mass, slope, grad, delta, lift, grad_query):
    """Gradients of the queries; also `delta` and `lift` of every row, which the other kernels read."""
    first_row = tl.program_id(0) * x.made.BLOCK_M
    head = tl.program_id(1).to(tl.int64)
    shared = head // x.sizes.gqa_ratio
    row = first_row + tl.arange(0, x.made.BLOCK_M)
    q = load_queries(x, head, row)
    g = load_dense(grad, head, row, x.sizes.queries, x.made.BLOCK_V, x.made.DV)
    o = load_dense(output, head, row, x.sizes.queries, x.made.BLOCK_V, x.made.DV)
    row_mass = load_column(log_mass, head, row, x.sizes.queries, float("inf"))
    row_delta = tl.sum(g.to(tl.float32) * o.to(tl.float32), 1)
    store_column(delta, head, row, x.sizes.queries, row_delta)
    total = tl.zeros((x.made.BLOCK_M, x.made.BLOCK_D), tl.float32)
    row_lift = tl.zeros((x.made.BLOCK_M,), tl.float32)
    if x.made.RANK > 0:
        left, right = low_rank(x, shared)
        back = dot(g, tl.trans(right), x.made.PRECISION)
        along, inside = along_of(x, q, left, shared)
        row_lift = tl.sum(along * back, 1)
        store_column(lift, head, row, x.sizes.queries, row_lift)
        row_slope = load_column(slope, head, row, x.sizes.queries, 0.0)
        pulled_along = tl.where(inside, row_slope[:, None] * back, 0.0).to(q.dtype)
        total += dot(pulled_along, tl.trans(left), x.made.PRECISION)
    for PART in tl.static_range(3):
        if has_part(x, PART):
            begin, end = part_entries(x, first_row, PART)
            for start in range(begin, end, x.made.BLOCK_N):
                entry = start + tl.arange(0, x.made.BLOCK_N)
                k, v = part_rows(x, shared, entry, PART)
                scores = part_scores(x, q, k, first_row, shared, entry, PART)
                gain = dot(g, tl.trans(v), x.made.PRECISION)
                if PART == MEANS and x.made.RANK > 0:
                    gain += row_lift[:, None] * load_column(x.means.factor, shared, entry, x.sizes.means, 0.0)[None, :]
                _weight, pulled = pull(scores, row_mass, row_delta, gain)
                total += dot(pulled.to(k.dtype), k, x.made.PRECISION)
    store_dense(grad_query, head, row, x.sizes.queries, total * x.scale, x.made.BLOCK_D, x.made.D)


@triton.jit
def key_gradients(
    x, log_mass, grad, delta, lift, tiles, grad_key, grad_value, grad_bias, grad_factor, PART: tl.constexpr
):
    """Gradients of a tile of keys, of the shared list or of stand-ins, from `tiles` of the tiles of queries.

    The band's keys meet the queries whose band touches the tile. Outputs are (parts, batch x key heads, entries, ...),
    to be summed over the parts.
    """
    first_entry = tl.program_id(0) * x.made.BLOCK_N
    part = tl.program_id(1)
    shared = tl.program_id(2).to(tl.int64)
    entry = first_entry + tl.arange(0, x.made.BLOCK_N)
    first, last, entries = 0, x.sizes.queries, x.sizes.means if PART == MEANS else x.sizes.entries
    if PART == BAND:
        first, last = band_queries(x, first_entry)
        entries = x.sizes.keys
    BENT: tl.constexpr = PART == MEANS and x.made.RANK > 0
    k, v = part_rows(x, shared, entry, PART)
    total_key = tl.zeros((x.made.BLOCK_N, x.made.BLOCK_D), tl.float32)
    total_value = tl.zeros((x.made.BLOCK_N, x.made.BLOCK_V), tl.float32)
    total_bias = tl.zeros((x.made.BLOCK_N,), tl.float32)
    total_factor = tl.zeros((x.made.BLOCK_N,), tl.float32)
    if BENT:
        factor = load_column(x.means.factor, shared, entry, entries, 0.0)
    begin, end, per_head = part_of_queries(x, first, last, part, tiles)
    for tile in range(begin, end):
        head = shared * x.sizes.gqa_ratio + tile // per_head
        first_row = first + tile % per_head * x.made.BLOCK_M
        row = first_row + tl.arange(0, x.made.BLOCK_M)
        q = load_queries(x, head, row)
        g = load_dense(grad, head, row, x.sizes.queries, x.made.BLOCK_V, x.made.DV)
        row_mass = load_column(log_mass, head, row, x.sizes.queries, float("inf"))
        row_delta = load_column(delta, head, row, x.sizes.queries, 0.0)
        gain = dot(g, tl.trans(v), x.made.PRECISION)
        scores = part_scores(x, q, k, first_row, shared, entry, PART)
        if BENT:
            row_lift = load_column(lift, head, row, x.sizes.queries, 0.0)
            gain += row_lift[:, None] * factor[None, :]
        weight, pulled = pull(scores, row_mass, row_delta, gain)
        to_key, to_value = gradients_of(weight, pulled, q, g, x.made.PRECISION)
        total_key += to_key
        total_value += to_value
        if PART == MEANS:
            total_bias += tl.sum(pulled, 0)
        if BENT:
            total_factor += tl.sum(weight * row_lift[:, None], 0)
    at = part * tl.num_programs(2) + shared
    store_gradients(x, grad_key, grad_value, at, entry, entries, total_key * x.scale, total_value)
    if PART == MEANS:
        store_column(grad_bias, at, entry, entries, total_bias)
    if BENT:
        store_column(grad_factor, at, entry, entries, total_factor)


@triton.jit
def slope_gradients(x, slope, grad, tiles, grad_left, grad_right):
    """Gradients of `left` and `right` from `tiles` of the tiles of queries; outputs (parts, batch x key heads, ...)."""
    part = tl.program_id(0)
    shared = tl.program_id(1).to(tl.int64)
    left, right = low_rank(x, shared)
    total_left = tl.zeros((x.made.BLOCK_D, x.made.BLOCK_R), tl.float32)
    total_right = tl.zeros((x.made.BLOCK_R, x.made.BLOCK_V), tl.float32)
    begin, end, per_head = part_of_queries(x, 0, x.sizes.queries, part, tiles)
    for tile in range(begin, end):
        head = shared * x.sizes.gqa_ratio + tile // per_head
        row = tile % per_head * x.made.BLOCK_M + tl.arange(0, x.made.BLOCK_M)
        q = load_queries(x, head, row)
        g = load_dense(grad, head, row, x.sizes.queries, x.made.BLOCK_V, x.made.DV)
        row_slope = load_column(slope, head, row, x.sizes.queries, 0.0)[:, None]
        along, inside = along_of(x, q, left, shared)
        back = row_slope * x.scale * dot(g, tl.trans(right), x.made.PRECISION)
        back = tl.where(inside, back, 0.0).to(q.dtype)
        total_right += dot(tl.trans((row_slope * along).to(g.dtype)), g, x.made.PRECISION)
        total_left += dot(tl.trans(q), back, x.made.PRECISION)
    at = part * tl.num_programs(1) + shared
    store_dense(grad_left, at, tl.arange(0, x.made.BLOCK_D), x.made.D, total_left, x.made.BLOCK_R, x.made.RANK)
    store_dense(grad_right, at, tl.arange(0, x.made.BLOCK_R), x.made.RANK, total_right, x.made.BLOCK_V, x.made.DV)
