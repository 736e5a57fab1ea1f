"""What a tile of one group's queries sees, and the kernel that attends to it.

A program takes up to `BLOCK_M` queries of one group of one head, wherever they stand. It walks one sequence of keys,
tile by tile: the group's, and behind them those of the shared list that are in other groups. The band's keys differ
from row to row: they are taken one place of the band at a time.

With `z = score log2(e)` for softmax and `z = (alpha - 1) score` for entmax, a weight is `f(z - level) inverse`, where f
is `2^x` or `max(0, x)^(1 / (alpha - 1))`. Softmax takes one pass. Entmax finds the row's level first, from scores that
every round computes again. All sums are float32.

Arguments come in one named tuple, `grouped_op.Call`. Alpha is 1 for softmax. Query i stands at position `i + offset`
among the keys. Places and rows that fill a tile up lie after the last; what lies outside a tensor is read as zeros.

Experimental: run in Triton's interpreter, and on no device yet.
"""

# Kernels are compiled from their source: Triton, which ships no types, gives the meaning of what they take.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

import triton
import triton.language as tl

from fewkeys.execute.triton.tiles import (
    add_entries,
    load_column,
    load_keys,
    load_queries,
    load_values,
    mix,
    store_column,
    store_dense,
    visible,
)
from fewkeys.sketch.triton.tiles import dot

CLOSE = tl.constexpr(2e-6)
"""A step of the level that is smaller, beside the level or 1, is the last: convergence is quadratic."""
ROUNDS = tl.constexpr(64)
"""A bound that is never reached."""


@triton.jit
def tile_of(tiles, head):
    """This program's group, its first token in the order and the one after its last, and the same of the others."""
    at = tiles + (head * tl.num_programs(0) + tl.program_id(0)) * 5
    return tl.load(at), tl.load(at + 1), tl.load(at + 2), tl.load(at + 3), tl.load(at + 4)


@triton.jit
def tokens_at(order, at, last, head, tokens):
    """The tokens `at`, in a head's order; `tokens` from `last` on."""
    return tl.load(order + head * tokens + at, mask=at < last, other=tokens)


@triton.jit
def key_places(x, at, begin, end, group, head):
    """Where the keys `at` (N) of the sequence stand: those of the group, then those of the list in other groups."""
    place = tokens_at(x.members.key_order, begin + at, end, head, x.sizes.keys)
    if x.members.listed is not None:
        entry = at - (end - begin)
        inside = (entry >= 0) & (entry < x.sizes.entries)
        listed = x.members.listed + head // x.sizes.gqa_ratio * x.sizes.entries
        listed = tl.load(listed + entry, mask=inside, other=x.sizes.keys)
        own = load_column(x.members.key_group, head, listed, x.sizes.keys, -1)
        place = tl.where((entry < 0) | (own == group), place, listed)
    return place


@triton.jit
def near_places(x, position, shift, group, head):
    """The key `shift` after each query (M,), Nk where it is outside, marked as hidden, or in the tile's group."""
    place = position + shift
    inside = (place >= 0) & (place < x.sizes.keys)
    own = tl.load(x.members.key_group + head * x.sizes.keys + place, mask=inside, other=-1)
    seen = inside & (own != group)
    if x.near.hidden is not None:
        hidden = x.near.hidden + head // x.sizes.gqa_ratio * x.sizes.keys
        seen = seen & (tl.load(hidden + place, mask=inside, other=1) == 0)
    return tl.where(seen, place, x.sizes.keys)


@triton.jit
def steps(x, begin, end, NEAR: tl.constexpr):
    """The first step along the sequence, or along the band (`NEAR`), the one after the last, and how long each is."""
    if NEAR:
        return -x.sizes.band_left, x.sizes.band_right + 1, 1
    else:
        return 0, end - begin + x.sizes.entries, x.made.BLOCK_N


@triton.jit
def meet(x, rows, others, NEAR: tl.constexpr):
    """Products (M, N) of rows with those that all share; or of each with its own (M, 1)."""
    if NEAR:
        return tl.sum(rows.to(tl.float32) * others.to(tl.float32), 1)[:, None]
    else:
        return dot(rows, tl.trans(others), x.made.PRECISION)


@triton.jit
def step_tile(x, at, q, position, begin, end, group, head, NEAR: tl.constexpr):
    """A tile of the sequence, or the key `at` after each query: where the keys stand, the keys, and their scores z."""
    if NEAR:
        place = near_places(x, position, at, group, head)
        seen = (place < x.sizes.keys)[:, None]
    else:
        place = key_places(x, at + tl.arange(0, x.made.BLOCK_N), begin, end, group, head)
        seen = visible(x, position, place)
    k = load_keys(x, head // x.sizes.gqa_ratio, place)
    return place, k, tl.where(seen, meet(x, q, k, NEAR) * x.factor, float("-inf"))


@triton.jit
def raised(x, POWER: tl.constexpr):
    """`x^POWER` of x >= 0; 0 stays 0."""
    if POWER == 0.0:
        return tl.where(x > 0, 1.0, 0.0)
    elif POWER == 0.5:
        return tl.sqrt(x)
    elif POWER == 1.0:
        return x
    elif POWER == 2.0:
        return x * x
    else:
        return tl.where(x > 0, tl.exp2(tl.log2(tl.where(x > 0, x, 1.0)) * POWER), 0.0)


@triton.jit
def scan(x, level, q, position, begin, end, group, head, TOP: tl.constexpr):
    """Every row's largest z, twice (`TOP`); or `sum f(z - level)`, and the sum of `f^(2 - alpha)`."""
    total = tl.full((x.made.BLOCK_M,), float("-inf") if TOP else 0.0, tl.float32)
    slope = total
    for NEAR in tl.static_range(1 + x.made.BAND):
        start, stop, step = steps(x, begin, end, NEAR)
        for at in range(start, stop, step):
            _place, _k, scores = step_tile(x, at, q, position, begin, end, group, head, NEAR)
            if TOP:
                total = tl.maximum(total, tl.max(scores, 1))
            else:
                above = tl.maximum(scores - level[:, None], 0.0)
                low = raised(above, (2 - x.made.ALPHA) / (x.made.ALPHA - 1))
                total += tl.sum(low * above, 1)
                slope += tl.sum(low, 1)
    return total, slope


@triton.jit
def attend_groups(x, tiles, output, level, inverse):
    """Outputs, and the level and inverse of every row; both 0 for rows that see nothing.

    Entmax's level is the root of `(sum f(z - level))^(alpha - 1) = 1`, a norm that is convex in the level: Newton's
    steps from below climb to it and never pass it, and equal entries take one step, however many they are.
    """
    head = tl.program_id(1).to(tl.int64)
    group, first, last, begin, end = tile_of(tiles, head)
    if first >= last:
        return
    row = tokens_at(x.members.query_order, first + tl.arange(0, x.made.BLOCK_M), last, head, x.sizes.queries)
    position = row + x.sizes.offset
    q = load_queries(x, head, row)
    top = tl.full((x.made.BLOCK_M,), float("-inf"), tl.float32)
    if x.made.ALPHA > 1:
        top, _same = scan(x, top, q, position, begin, end, group, head, True)
        top = tl.where(top > float("-inf"), top - 1.0, 0.0)
        moved = 1.0
        rounds = 0
        while (moved > CLOSE) & (rounds < ROUNDS):
            total, slope = scan(x, top, q, position, begin, end, group, head, False)
            rise = tl.where(slope > 0, (total - raised(total, 2 - x.made.ALPHA)) / tl.where(slope > 0, slope, 1.0), 0.0)
            moved = tl.max(tl.abs(rise) / tl.maximum(tl.abs(top), 1.0), 0)
            top += rise
            rounds += 1

    mass = tl.zeros((x.made.BLOCK_M,), tl.float32)
    mixed = tl.zeros((x.made.BLOCK_M, x.made.BLOCK_V), tl.float32)
    for NEAR in tl.static_range(1 + x.made.BAND):
        start, stop, step = steps(x, begin, end, NEAR)
        for at in range(start, stop, step):
            place, _k, scores = step_tile(x, at, q, position, begin, end, group, head, NEAR)
            v = load_values(x, head // x.sizes.gqa_ratio, place)
            if x.made.ALPHA > 1:
                weight = raised(tl.maximum(scores - top[:, None], 0.0), 1 / (x.made.ALPHA - 1))
                mass += tl.sum(weight, 1)
                mixed += mix(weight, v, x.made.PRECISION)
            else:
                top, mass, mixed, _weight, _shrink = add_entries(top, mass, mixed, scores, v, x.made.PRECISION)

    part = tl.where(mass > 0, 1 / tl.where(mass > 0, mass, 1.0), 0.0)
    store_dense(output, head, row, x.sizes.queries, mixed * part[:, None], x.made.BLOCK_V, x.made.DV)
    store_column(level, head, row, x.sizes.queries, tl.where(mass > 0, top, 0.0))
    store_column(inverse, head, row, x.sizes.queries, part)
