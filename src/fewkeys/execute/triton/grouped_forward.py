"""What a tile of one group's queries sees, and the kernel that attends to it.

A program takes up to `BLOCK_M` queries of one group of one head, wherever they stand. It walks one sequence of keys,
tile by tile: the group's, and behind them those of the shared list that are in other groups. The band's keys differ
from row to row: they are taken one place of the band at a time.

With `z = score log2(e)` for softmax and `z = (alpha - 1) score` for entmax, a weight is `f(z - level) share`, where f
is `2^x` or `max(0, x)^(1 / (alpha - 1))`. Softmax takes one pass. Entmax finds the row's level first, from scores that
every round computes again. All sums are float32.

Arguments come in the named tuples of `grouped_op`. Alpha is 1 for softmax. Query i stands at position `i + offset`
among the keys. Places and rows that fill a tile up lie after the last; what lies outside a tensor is read as zeros.

Experimental: run in Triton's interpreter, and on no device yet.
"""

# Kernels are compiled from their source: Triton, which ships no types, gives the meaning of what they take.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

import triton
import triton.language as tl

from fewkeys.execute.triton.tiles import (
    add_entries,
    grown,
    load_keys,
    load_queries,
    load_values,
    scores_of,
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
def key_places(at, begin, end, group, head, shared, members, sizes):
    """Where the keys `at` (N) of the sequence stand: those of the group, then those of the list in other groups."""
    place = tokens_at(members.key_order, begin + at, end, head, sizes.keys)
    if members.listed is not None:
        entry = at - (end - begin)
        inside = (entry >= 0) & (entry < sizes.entries)
        listed = tl.load(members.listed + shared * sizes.entries + entry, mask=inside, other=sizes.keys)
        own = tl.load(members.key_group + head * sizes.keys + listed, mask=listed < sizes.keys, other=-1)
        place = tl.where((entry < 0) | (own == group), place, listed)
    return place


@triton.jit
def near_places(position, shift, group, head, shared, near, members, sizes):
    """The key `shift` after each query (M,), Nk where it is outside, marked as hidden, or in the tile's group."""
    place = position + shift
    inside = (place >= 0) & (place < sizes.keys)
    own = tl.load(members.key_group + head * sizes.keys + place, mask=inside, other=-1)
    seen = inside & (own != group)
    if near.hidden is not None:
        seen = seen & (tl.load(near.hidden + shared * sizes.keys + place, mask=inside, other=1) == 0)
    return tl.where(seen, place, sizes.keys)


@triton.jit
def sequence_tile(
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
    D: tl.constexpr,
    CAUSAL: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """A tile of the sequence: where its keys (N) stand, the keys, and their scores z (M, N)."""
    shared = head // sizes.groups
    place = key_places(start + tl.arange(0, BLOCK_N), begin, end, group, head, shared, members, sizes)
    k = load_keys(near, sizes, shared, place, BLOCK_D, D)
    return place, k, scores_of(q, k, visible(position, place, sizes, CAUSAL), factor, PRECISION)


@triton.jit
def near_tile(
    shift,
    q,
    position,
    group,
    head,
    near,
    members,
    sizes,
    factor,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """The key `shift` after each query: where it stands, the keys (M, D), and their scores z (M,)."""
    shared = head // sizes.groups
    place = near_places(position, shift, group, head, shared, near, members, sizes)
    k = load_keys(near, sizes, shared, place, BLOCK_D, D)
    scores = tl.sum(q.to(tl.float32) * k.to(tl.float32), 1) * factor
    return place, k, tl.where(place < sizes.keys, scores, float("-inf"))


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
        return tl.where(x > 0, tl.exp2(POWER * tl.log2(tl.where(x > 0, x, 1.0))), 0.0)


@triton.jit
def scan(
    level,
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
    TOP: tl.constexpr,
    ALPHA: tl.constexpr,
    D: tl.constexpr,
    CAUSAL: tl.constexpr,
    BAND: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Every row's largest z, twice (`TOP`); or `sum f(z - level)`, and the sum of `f^(2 - alpha)`."""
    total = tl.full((BLOCK_M,), float("-inf") if TOP else 0.0, tl.float32)
    slope = total
    for start in range(0, end - begin + sizes.entries, BLOCK_N):
        _place, _k, scores = sequence_tile(
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
        if TOP:
            total = tl.maximum(total, tl.max(scores, 1))
        else:
            above = tl.maximum(scores - level[:, None], 0.0)
            low = raised(above, (2 - ALPHA) / (ALPHA - 1))
            total += tl.sum(low * above, 1)
            slope += tl.sum(low, 1)
    if BAND:
        for shift in range(-sizes.band_left, sizes.band_right + 1):
            _place, _k, scores = near_tile(shift, q, position, group, head, near, members, sizes, factor, D, BLOCK_D)
            if TOP:
                total = tl.maximum(total, scores)
            else:
                above = tl.maximum(scores - level, 0.0)
                low = raised(above, (2 - ALPHA) / (ALPHA - 1))
                total += low * above
                slope += low
    return total, slope


@triton.jit
def attend_groups(
    near,
    members,
    tiles,
    sizes,
    factor,
    output,
    level,
    share,
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
    """Outputs, and the level and share of every row; both 0 for rows that see nothing.

    Entmax's level is the root of `(sum f(z - level))^(alpha - 1) = 1`, a norm that is convex in the level: Newton's
    steps from below climb to it and never pass it, and equal entries take one step, however many they are.
    """
    head = tl.program_id(1).to(tl.int64)
    shared = head // sizes.groups
    group, first, last, begin, end = tile_of(tiles, head)
    if first >= last:
        return
    row = tokens_at(members.query_order, first + tl.arange(0, BLOCK_M), last, head, sizes.queries)
    position = row + sizes.offset
    q = load_queries(near, sizes, head, row, BLOCK_D, D)
    top = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    if ALPHA > 1:
        top, _same = scan(
            top, q, position, begin, end, group, head, near, members, sizes, factor,
            True, ALPHA, D, CAUSAL, BAND, BLOCK_M, BLOCK_N, BLOCK_D, PRECISION,
        )  # fmt: skip
        top = tl.where(top > float("-inf"), top - 1.0, 0.0)
        moved = 1.0
        rounds = 0
        while (moved > CLOSE) & (rounds < ROUNDS):
            total, slope = scan(
                top, q, position, begin, end, group, head, near, members, sizes, factor,
                False, ALPHA, D, CAUSAL, BAND, BLOCK_M, BLOCK_N, BLOCK_D, PRECISION,
            )  # fmt: skip
            step = tl.where(slope > 0, (total - raised(total, 2 - ALPHA)) / tl.where(slope > 0, slope, 1.0), 0.0)
            moved = tl.max(tl.abs(step) / tl.maximum(tl.abs(top), 1.0), 0)
            top += step
            rounds += 1

    mass = tl.zeros((BLOCK_M,), tl.float32)
    mixed = tl.zeros((BLOCK_M, BLOCK_V), tl.float32)
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
        if ALPHA > 1:
            weight = raised(tl.maximum(scores - top[:, None], 0.0), 1 / (ALPHA - 1))
            mass += tl.sum(weight, 1)
            mixed += dot(weight.to(v.dtype), v, PRECISION)
        else:
            top, mass, mixed, _weight, _shrink = add_entries(top, mass, mixed, scores, v, PRECISION)
    if BAND:
        for shift in range(-sizes.band_left, sizes.band_right + 1):
            place, _k, scores = near_tile(shift, q, position, group, head, near, members, sizes, factor, D, BLOCK_D)
            v = load_values(near, sizes, shared, place, BLOCK_V, DV).to(tl.float32)
            if ALPHA > 1:
                weight = raised(tl.maximum(scores - top, 0.0), 1 / (ALPHA - 1))
                mass += weight
                mixed += weight[:, None] * v
            else:
                top, origin, shrink = grown(top, scores)
                weight = tl.exp2(scores - origin)
                mass = mass * shrink + weight
                mixed = mixed * shrink[:, None] + weight[:, None] * v

    part = tl.where(mass > 0, 1 / tl.where(mass > 0, mass, 1.0), 0.0)
    store_dense(output, head, row, sizes.queries, mixed * part[:, None], BLOCK_V, DV)
    store_column(level, head, row, sizes.queries, tl.where(mass > 0, top, 0.0))
    store_column(share, head, row, sizes.queries, part)
