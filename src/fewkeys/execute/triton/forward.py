"""What a tile of queries sees, and the kernel that attends to it in one pass.

A program takes `BLOCK_M` queries of one head. It walks the band's keys, the shared list and the stand-ins, tile by
tile, with a running maximum and sum (in powers of two), so no score leaves the chip. All sums are float32.

Arguments come in one named tuple, `op.Call`. Query i stands at position `i + offset` among the keys. What lies
outside a tensor is read as zeros.

Experimental: run in Triton's interpreter, and on no device yet.
"""

# Kernels are compiled from their source: Triton, which ships no types, gives the meaning of what they take.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

import triton
import triton.language as tl

from fewkeys.execute.triton.tiles import (
    add_entries,
    band_keys,
    in_band,
    load_column,
    load_dense,
    load_keys,
    load_queries,
    load_values,
    scores_of,
    store_column,
    store_dense,
    unhidden,
    visible,
)
from fewkeys.sketch.triton.tiles import dot

LOG2_E = tl.constexpr(1.4426950408889634)
BAND, LISTED, MEANS = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
ROUNDING = tl.constexpr(1e-5)
"""A stand-in vanishes where this share of its keys, or less, is left: that much may be rounding."""


@triton.jit
def unkept(x, first_row, shared, entry):
    """For how many keys each stand-in speaks (M, N): its total less what the keys in the queries' band hold.

    Shares are at most one. They are multiplied in two halves of float16, which together are exact to 2^-22.
    """
    position = first_row + tl.arange(0, x.made.BLOCK_M) + x.sizes.offset
    held = tl.zeros((x.made.BLOCK_M, x.made.BLOCK_N), tl.float32)
    first, last = band_keys(x, first_row)
    for start in range(first, last, x.made.BLOCK_N):
        place = start + tl.arange(0, x.made.BLOCK_N)
        owner = load_column(x.means.label, shared, place, x.sizes.keys, -1)
        share = load_column(x.means.share, shared, place, x.sizes.keys, 0.0)
        shares = tl.where(owner[:, None] == entry[None, :], share[:, None], 0.0)
        inside = in_band(x, position, place).to(tl.float16)
        upper = shares.to(tl.float16)
        lower = (shares - upper.to(tl.float32)).to(tl.float16)
        held += dot(inside, upper, "ieee") + dot(inside, lower, "ieee")
    total = load_column(x.means.total, shared, entry, x.sizes.means, 0.0)[None, :]
    return tl.where(total - held > total * ROUNDING, total - held, 0.0)


@triton.jit
def has_part(x, PART: tl.constexpr):
    """Whether there is such a part: `BAND` is always, the others where they are given."""
    if PART == LISTED:
        return x.listed.key is not None
    else:
        return PART == BAND or x.means.key is not None


@triton.jit
def part_rows(x, shared, entry, PART: tl.constexpr):
    """Keys and values of some entries of the band, the list or the stand-ins."""
    if PART == BAND:
        k = load_keys(x, shared, entry)
        v = load_values(x, shared, entry)
    else:
        source = x.means if PART == MEANS else x.listed
        entries = x.sizes.means if PART == MEANS else x.sizes.entries
        k = load_dense(source.key, shared, entry, entries, x.made.BLOCK_D, x.made.D)
        v = load_dense(source.value, shared, entry, entries, x.made.BLOCK_V, x.made.DV)
    return k, v


@triton.jit
def part_scores(x, q, k, first_row, shared, entry, PART: tl.constexpr):
    """Scores (M, N) in powers of two of the queries from `first_row` on, -inf for what they do not see.

    Fillings of the list stand after the last key. Stand-ins have the logarithm of how many keys they speak for.
    """
    position = first_row + tl.arange(0, x.made.BLOCK_M) + x.sizes.offset
    if PART == BAND:
        seen = in_band(x, position, entry) & unhidden(x, shared, entry)[None, :]
        scores = scores_of(q, k, seen, x.scale * LOG2_E, x.made.PRECISION)
    elif PART == LISTED:
        place = load_column(x.listed.place, shared, entry, x.sizes.entries, x.sizes.keys)
        scores = scores_of(q, k, visible(x, position, place), x.scale * LOG2_E, x.made.PRECISION)
    else:
        count = unkept(x, first_row, shared, entry)
        bias = load_column(x.means.bias, shared, entry, x.sizes.means, 0.0)[None, :]
        scores = (dot(q, tl.trans(k), x.made.PRECISION) * x.scale + bias) * LOG2_E
        scores = tl.where(count > 0, scores + tl.log2(tl.where(count > 0, count, 1.0)), float("-inf"))
    return scores


@triton.jit
def part_entries(x, first_row, PART: tl.constexpr):
    """The first entry of a part that a tile of queries looks at, and the one after the last."""
    if PART == BAND:
        return band_keys(x, first_row)
    else:
        return 0, x.sizes.means if PART == MEANS else x.sizes.entries


@triton.jit
def low_rank(x, shared):
    """The factors of the stand-ins' first-order term, (D, R) and (R, DV)."""
    rank = tl.arange(0, x.made.BLOCK_R)
    left = load_dense(x.means.left, shared, tl.arange(0, x.made.BLOCK_D), x.made.D, x.made.BLOCK_R, x.made.RANK)
    return left, load_dense(x.means.right, shared, rank, x.made.RANK, x.made.BLOCK_V, x.made.DV)


@triton.jit
def along_of(x, q, left, shared):
    """Queries along the left factor (M, R), scaled, and where they are inside the bounds, which they never leave."""
    rank = tl.arange(0, x.made.BLOCK_R)
    low = load_column(x.means.bounds, 2 * shared, rank, x.made.RANK, 0.0)[None, :]
    high = load_column(x.means.bounds, 2 * shared + 1, rank, x.made.RANK, 0.0)[None, :]
    along = dot(q, left, x.made.PRECISION) * x.scale
    return tl.minimum(tl.maximum(along, low), high), (along >= low) & (along <= high)


@triton.jit
def attend_rows(x, output, log_mass, slope):
    """Outputs, log2 of the rows' sums (+inf for rows that see nothing), and `slope = sum_c A_ic factor_c`."""
    first_row = tl.program_id(0) * x.made.BLOCK_M
    head = tl.program_id(1).to(tl.int64)
    shared = head // x.sizes.gqa_ratio
    row = first_row + tl.arange(0, x.made.BLOCK_M)
    q = load_queries(x, head, row)
    top = tl.full((x.made.BLOCK_M,), float("-inf"), tl.float32)
    mass = tl.zeros((x.made.BLOCK_M,), tl.float32)
    mixed = tl.zeros((x.made.BLOCK_M, x.made.BLOCK_V), tl.float32)
    bent = tl.zeros((x.made.BLOCK_M,), tl.float32)
    for PART in tl.static_range(3):
        if has_part(x, PART):
            begin, end = part_entries(x, first_row, PART)
            for start in range(begin, end, x.made.BLOCK_N):
                entry = start + tl.arange(0, x.made.BLOCK_N)
                k, v = part_rows(x, shared, entry, PART)
                scores = part_scores(x, q, k, first_row, shared, entry, PART)
                top, mass, mixed, weight, shrink = add_entries(top, mass, mixed, scores, v, x.made.PRECISION)
                if PART == MEANS and x.made.RANK > 0:
                    factor = load_column(x.means.factor, shared, entry, x.sizes.means, 0.0)
                    bent = bent * shrink + tl.sum(weight * factor[None, :], 1)

    safe = tl.where(mass > 0, mass, 1.0)
    if x.made.RANK > 0:
        left, right = low_rank(x, shared)
        along, _inside = along_of(x, q, left, shared)
        mixed += bent[:, None] * dot(along.to(right.dtype), right, x.made.PRECISION)
        store_column(slope, head, row, x.sizes.queries, bent / safe)
    store_dense(output, head, row, x.sizes.queries, mixed / safe[:, None], x.made.BLOCK_V, x.made.DV)
    # A weight is exp2(score - log_mass): rows that see nothing have none, whatever the score.
    store_column(log_mass, head, row, x.sizes.queries, tl.where(mass > 0, top + tl.log2(safe), float("inf")))
