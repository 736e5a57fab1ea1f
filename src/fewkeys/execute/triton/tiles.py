"""Tiles of attention in Triton: what all its kernels read, weigh and add up.

Experimental: run in Triton's interpreter, and on no device yet.

Arguments come in one named tuple, `op.Call` or `grouped_op.Call`; heads are counted through the batch, in int64. What
lies outside a tensor is read as zeros.
"""

# Kernels are compiled from their source: Triton, which ships no types, gives the meaning of what they take.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

import triton
import triton.language as tl

from fewkeys.sketch.triton.tiles import base_of, dot, load_rows, store_rows


@triton.jit
def load_queries(x, head, row):
    """Rows of a query head (M, D)."""
    base = base_of(x.near.query, x.near.query_strides, head, x.sizes.heads)
    return load_rows(base, row, x.sizes.queries, x.near.query_strides[2], tl.arange(0, x.made.BLOCK_D), x.made.D)


@triton.jit
def load_keys(x, shared, place):
    """Keys of a key head (N, D)."""
    base = base_of(x.near.key, x.near.key_strides, shared, x.sizes.heads // x.sizes.groups)
    return load_rows(base, place, x.sizes.keys, x.near.key_strides[2], tl.arange(0, x.made.BLOCK_D), x.made.D)


@triton.jit
def load_values(x, shared, place):
    """Values of a key head (N, DV)."""
    base = base_of(x.near.value, x.near.value_strides, shared, x.sizes.heads // x.sizes.groups)
    return load_rows(base, place, x.sizes.keys, x.near.value_strides[2], tl.arange(0, x.made.BLOCK_V), x.made.DV)


@triton.jit
def load_dense(rows, head, row, count, BLOCK: tl.constexpr, WIDTH: tl.constexpr):
    """Some rows of a head (.., WIDTH) of a dense tensor with `count` rows a head."""
    return load_rows(rows + head * count * WIDTH, row, count, WIDTH, tl.arange(0, BLOCK), WIDTH)


@triton.jit
def store_dense(rows, head, row, count, tile, BLOCK: tl.constexpr, WIDTH: tl.constexpr):
    """Write some rows of a head of a dense tensor with `count` rows a head."""
    store_rows(rows + head * count * WIDTH, row, count, WIDTH, tl.arange(0, BLOCK), WIDTH, tile)


@triton.jit
def load_column(numbers, head, row, count, other):
    """One number for each of some rows of a head."""
    return tl.load(numbers + head * count + row, mask=row < count, other=other)


@triton.jit
def store_column(numbers, head, row, count, column):
    """Write one number for each of some rows of a head."""
    tl.store(numbers + head * count + row, column, mask=row < count)


@triton.jit
def store_gradients(x, into_key, into_value, head, row, count, to_key, to_value):
    """Write gradients of some keys and values of a head with `count` of them."""
    store_dense(into_key, head, row, count, to_key, x.made.BLOCK_D, x.made.D)
    store_dense(into_value, head, row, count, to_value, x.made.BLOCK_V, x.made.DV)


@triton.jit
def in_band(x, position, place):
    """Which keys at `place` (N) lie in the band of the queries at `position` (M): (M, N)."""
    step = place[None, :] - position[:, None]
    return (step >= -x.sizes.band_left) & (step <= x.sizes.band_right) & (place < x.sizes.keys)[None, :]


@triton.jit
def unhidden(x, shared, place):
    """Which keys at `place` (N) a band may reach."""
    if x.near.hidden is None:
        return place < x.sizes.keys
    else:
        return load_column(x.near.hidden, shared, place, x.sizes.keys, 1) == 0


@triton.jit
def band_keys(x, first_row):
    """The first key in the band of a tile of queries, and the key after the last."""
    last_row = tl.minimum(first_row + x.made.BLOCK_M, x.sizes.queries) - 1
    first = tl.maximum(first_row + x.sizes.offset - x.sizes.band_left, 0)
    return first, tl.minimum(last_row + x.sizes.offset + x.sizes.band_right + 1, x.sizes.keys)


@triton.jit
def band_queries(x, first_place):
    """The first query whose band reaches a tile of keys, and the query after the last."""
    first = tl.maximum(first_place - x.sizes.band_right - x.sizes.offset, 0)
    last_place = first_place + x.made.BLOCK_N
    return first, tl.minimum(last_place + x.sizes.band_left - x.sizes.offset, x.sizes.queries)


@triton.jit
def part_of_queries(x, first, last, part, tiles):
    """Which tiles belong to a part of the queries `first .. last - 1` of the heads that share keys, by `tiles` a part.

    The first such tile, the one after the last, and how many each head has.
    """
    per_head = tl.cdiv(last - first, x.made.BLOCK_M)
    return part * tiles, tl.minimum((part + 1) * tiles, per_head * x.sizes.groups), per_head


@triton.jit
def visible(x, position, place):
    """Which keys at `place` (N) are there and, where that matters, not behind the queries at `position` (M): (M, N)."""
    seen = (place < x.sizes.keys)[None, :]
    if x.made.CAUSAL:
        seen = seen & (place[None, :] <= position[:, None])
    return seen


@triton.jit
def scores_of(q, k, seen, factor, PRECISION: tl.constexpr):
    """Scores (M, N), -inf where nothing is seen."""
    return tl.where(seen, dot(q, tl.trans(k), PRECISION) * factor, float("-inf"))


@triton.jit
def mix(weight, rows, PRECISION: tl.constexpr):
    """Sums (M, W) of rows (N, W) that all share, by their weights (M, N); or each of its own (M, W), by (M, 1)."""
    if weight.shape[1] == 1:
        return weight * rows.to(tl.float32)
    else:
        return dot(weight.to(rows.dtype), rows, PRECISION)


@triton.jit
def add_entries(top, mass, mixed, scores, value, PRECISION: tl.constexpr):
    """Join entries to rows' running maximum, sum and weighted values; also their weights, and how the old shrank."""
    new = tl.maximum(top, tl.max(scores, 1))
    shift = tl.where(new == float("-inf"), 0.0, new)
    shrink = tl.exp2(top - shift)
    weight = tl.exp2(scores - shift[:, None])
    mass = mass * shrink + tl.sum(weight, 1)
    mixed = mixed * shrink[:, None] + mix(weight, value, PRECISION)
    return new, mass, mixed, weight, shrink


@triton.jit
def gradients_of(weight, pulled, q, g, PRECISION: tl.constexpr):
    """What a tile of queries adds to the gradients of the keys, over the scale, and of the values."""
    to_key = dot(tl.trans(pulled.to(q.dtype)), q, PRECISION)
    return to_key, dot(tl.trans(weight.to(g.dtype)), g, PRECISION)
