"""Tiles of attention in Triton: what all its kernels read, weigh and add up.

Experimental: run in Triton's interpreter, and on no device yet.

Arguments come in the named tuples of `op` and `grouped_op`; heads are counted through the batch, in int64. What lies
outside a tensor is read as zeros.
"""

# Kernels are compiled from their source: Triton, which ships no types, gives the meaning of what they take.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

import triton
import triton.language as tl

from fewkeys.sketch.triton.tiles import dot, load_rows, store_rows


@triton.jit
def load_queries(near, sizes, head, row, BLOCK_D: tl.constexpr, D: tl.constexpr):
    """Rows of a query head (M, D)."""
    strides = near.query_strides
    base = near.query + head // sizes.heads * strides[0] + head % sizes.heads * strides[1]
    return load_rows(base, row, sizes.queries, strides[2], tl.arange(0, BLOCK_D), D)


@triton.jit
def load_keys(near, sizes, shared, place, BLOCK_D: tl.constexpr, D: tl.constexpr):
    """Keys of a key head (N, D)."""
    strides, kv_heads = near.key_strides, sizes.heads // sizes.groups
    base = near.key + shared // kv_heads * strides[0] + shared % kv_heads * strides[1]
    return load_rows(base, place, sizes.keys, strides[2], tl.arange(0, BLOCK_D), D)


@triton.jit
def load_values(near, sizes, shared, place, BLOCK_V: tl.constexpr, DV: tl.constexpr):
    """Values of a key head (N, DV)."""
    strides, kv_heads = near.value_strides, sizes.heads // sizes.groups
    base = near.value + shared // kv_heads * strides[0] + shared % kv_heads * strides[1]
    return load_rows(base, place, sizes.keys, strides[2], tl.arange(0, BLOCK_V), DV)


@triton.jit
def load_dense(rows, head, row, count, BLOCK: tl.constexpr, WIDTH: tl.constexpr):
    """Some rows of a head (.., WIDTH) of a dense tensor with `count` rows a head."""
    return load_rows(rows + head * count * WIDTH, row, count, WIDTH, tl.arange(0, BLOCK), WIDTH)


@triton.jit
def store_dense(rows, head, row, count, tile, BLOCK: tl.constexpr, WIDTH: tl.constexpr):
    """Write some rows of a head of a dense tensor with `count` rows a head."""
    store_rows(rows + head * count * WIDTH, row, count, WIDTH, tl.arange(0, BLOCK), WIDTH, tile)


@triton.jit
def load_column(numbers, head, row, count, other: tl.constexpr):
    """One number for each of some rows of a head."""
    return tl.load(numbers + head * count + row, mask=row < count, other=other)


@triton.jit
def store_column(numbers, head, row, count, column):
    """Write one number for each of some rows of a head."""
    tl.store(numbers + head * count + row, column, mask=row < count)


@triton.jit
def in_band(position, place, sizes):
    """Which keys at `place` (N) lie in the band of the queries at `position` (M): (M, N)."""
    step = place[None, :] - position[:, None]
    return (step >= -sizes.band_left) & (step <= sizes.band_right) & (place < sizes.keys)[None, :]


@triton.jit
def band_keys(first_row, sizes, BLOCK_M: tl.constexpr):
    """The first key in the band of a tile of queries, and the key after the last."""
    last_row = tl.minimum(first_row + BLOCK_M, sizes.queries) - 1
    first = tl.maximum(first_row + sizes.offset - sizes.band_left, 0)
    return first, tl.minimum(last_row + sizes.offset + sizes.band_right + 1, sizes.keys)


@triton.jit
def band_queries(first_place, sizes, BLOCK_N: tl.constexpr):
    """The first query whose band reaches a tile of keys, and the query after the last."""
    first = tl.maximum(first_place - sizes.band_right - sizes.offset, 0)
    return first, tl.minimum(first_place + BLOCK_N + sizes.band_left - sizes.offset, sizes.queries)


@triton.jit
def visible(position, place, sizes, CAUSAL: tl.constexpr):
    """Which keys at `place` (N) are there and, where that matters, not behind the queries at `position` (M): (M, N)."""
    seen = (place < sizes.keys)[None, :]
    if CAUSAL:
        seen = seen & (place[None, :] <= position[:, None])
    return seen


@triton.jit
def scores_of(q, k, seen, factor, PRECISION: tl.constexpr):
    """Scores (M, N), -inf where nothing is seen."""
    return tl.where(seen, dot(q, tl.trans(k), PRECISION) * factor, float("-inf"))


@triton.jit
def grown(top, scores):
    """A row's new maximum, the number to subtract from its scores, and how its old weights shrink."""
    new = tl.maximum(top, scores)
    shift = tl.where(new == float("-inf"), 0.0, new)
    return new, shift, tl.exp2(top - shift)


@triton.jit
def add_entries(top, mass, mixed, scores, value, PRECISION: tl.constexpr):
    """Join entries to rows' running maximum, sum and weighted values; also their weights, and how the old shrank."""
    new, shift, shrink = grown(top, tl.max(scores, 1))
    weight = tl.exp2(scores - shift[:, None])
    mass = mass * shrink + tl.sum(weight, 1)
    mixed = mixed * shrink[:, None] + dot(weight.to(value.dtype), value, PRECISION)
    return new, mass, mixed, weight, shrink


@triton.jit
def gradients_of(weight, pulled, q, g, PRECISION: tl.constexpr):
    """What a tile of queries adds to the gradients of the keys, over the scale, and of the values."""
    to_key = dot(tl.trans(pulled.to(q.dtype)), q, PRECISION)
    return to_key, dot(tl.trans(weight.to(g.dtype)), g, PRECISION)
