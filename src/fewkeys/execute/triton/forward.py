"""What a tile of queries sees, and the kernel that attends to it in one pass.

A program takes `BLOCK_M` queries of one head. It walks the band's keys, the shared list and the stand-ins, tile by
tile, with a running maximum and sum (in powers of two), so no score leaves the chip. All sums are float32.

Arguments come in the named tuples of `op`. Query i stands at position `i + offset` among the keys. What lies
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
    visible,
)
from fewkeys.sketch.triton.tiles import dot

LOG2_E = tl.constexpr(1.4426950408889634)
BAND, LISTED, MEANS = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
ROUNDING = tl.constexpr(1e-5)
"""A stand-in vanishes where this share of its keys, or less, is left: that much may be rounding."""


@triton.jit
def band_scores(q, k, position, place, shared, near, sizes, scale, PRECISION: tl.constexpr):
    """Scores (M, N) in powers of two, -inf outside the band and for keys marked as hidden."""
    seen = in_band(position, place, sizes)
    if near.hidden is not None:
        seen = seen & (load_column(near.hidden, shared, place, sizes.keys, 1) == 0)[None, :]
    return scores_of(q, k, seen, scale * LOG2_E, PRECISION)


@triton.jit
def list_scores(q, k, position, entry, shared, listed, sizes, scale, CAUSAL: tl.constexpr, PRECISION: tl.constexpr):
    """Scores (M, N) of the shared list; the place of fillings is after the last key."""
    place = tl.load(listed.place + shared * sizes.entries + entry, mask=entry < sizes.entries, other=sizes.keys)
    return scores_of(q, k, visible(position, place, sizes, CAUSAL), scale * LOG2_E, PRECISION)


@triton.jit
def unkept(position, entry, first, last, shared, means, sizes, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """For how many keys each stand-in speaks (M, N): its total less what the band's keys `first .. last - 1` hold.

    Shares are at most one. They are multiplied in two halves of float16, which together are exact to 2^-22.
    """
    held = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(first, last, BLOCK_N):
        place = start + tl.arange(0, BLOCK_N)
        owner = load_column(means.label, shared, place, sizes.keys, -1)
        share = load_column(means.share, shared, place, sizes.keys, 0.0)
        shares = tl.where(owner[:, None] == entry[None, :], share[:, None], 0.0)
        inside = in_band(position, place, sizes).to(tl.float16)
        upper = shares.to(tl.float16)
        lower = (shares - upper.to(tl.float32)).to(tl.float16)
        held += dot(inside, upper, "ieee") + dot(inside, lower, "ieee")
    total = load_column(means.total, shared, entry, sizes.means, 0.0)[None, :]
    return tl.where(total - held > total * ROUNDING, total - held, 0.0)


@triton.jit
def mean_scores(q, k, entry, count, shared, means, sizes, scale, PRECISION: tl.constexpr):
    """Scores (M, N) of stand-ins that speak for `count` keys, with the logarithm of the count; -inf for none."""
    bias = load_column(means.bias, shared, entry, sizes.means, 0.0)[None, :]
    scores = (dot(q, tl.trans(k), PRECISION) * scale + bias) * LOG2_E
    return tl.where(count > 0, scores + tl.log2(tl.where(count > 0, count, 1.0)), float("-inf"))


@triton.jit
def part_tile(
    start,
    q,
    position,
    first,
    last,
    shared,
    near,
    listed,
    means,
    sizes,
    scale,
    PART: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    CAUSAL: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """A tile of the band, the list or the stand-ins: its entries, keys, values, and scores (M, N) in powers of two."""
    entry = start + tl.arange(0, BLOCK_N)
    if PART == BAND:
        k = load_keys(near, sizes, shared, entry, BLOCK_D, D)
        v = load_values(near, sizes, shared, entry, BLOCK_V, DV)
        scores = band_scores(q, k, position, entry, shared, near, sizes, scale, PRECISION)
    elif PART == LISTED:
        k = load_dense(listed.key, shared, entry, sizes.entries, BLOCK_D, D)
        v = load_dense(listed.value, shared, entry, sizes.entries, BLOCK_V, DV)
        scores = list_scores(q, k, position, entry, shared, listed, sizes, scale, CAUSAL, PRECISION)
    else:
        k = load_dense(means.key, shared, entry, sizes.means, BLOCK_D, D)
        v = load_dense(means.value, shared, entry, sizes.means, BLOCK_V, DV)
        count = unkept(position, entry, first, last, shared, means, sizes, BLOCK_M, BLOCK_N)
        scores = mean_scores(q, k, entry, count, shared, means, sizes, scale, PRECISION)
    return entry, k, v, scores


@triton.jit
def attend_rows(
    near,
    listed,
    means,
    sizes,
    scale,
    output,
    log_mass,
    slope,
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
    """Outputs, log2 of the rows' sums (+inf for rows that see nothing), and `slope = sum_c A_ic factor_c`."""
    first_row = tl.program_id(0) * BLOCK_M
    head = tl.program_id(1).to(tl.int64)
    shared = head // sizes.groups
    row = first_row + tl.arange(0, BLOCK_M)
    position = row + sizes.offset
    q = load_queries(near, sizes, head, row, BLOCK_D, D)
    top = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    mass = tl.zeros((BLOCK_M,), tl.float32)
    mixed = tl.zeros((BLOCK_M, BLOCK_V), tl.float32)

    first, last = band_keys(first_row, sizes, BLOCK_M)
    for start in range(first, last, BLOCK_N):
        _entry, _k, v, scores = part_tile(
            start, q, position, first, last, shared, near, listed, means, sizes, scale,
            BAND, D, DV, CAUSAL, BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_V, PRECISION,
        )  # fmt: skip
        top, mass, mixed, _weight, _shrink = add_entries(top, mass, mixed, scores, v, PRECISION)
    if listed.key is not None:
        for start in range(0, sizes.entries, BLOCK_N):
            _entry, _k, v, scores = part_tile(
                start, q, position, first, last, shared, near, listed, means, sizes, scale,
                LISTED, D, DV, CAUSAL, BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_V, PRECISION,
            )  # fmt: skip
            top, mass, mixed, _weight, _shrink = add_entries(top, mass, mixed, scores, v, PRECISION)
    bent = tl.zeros((BLOCK_M,), tl.float32)
    if means.key is not None:
        for start in range(0, sizes.means, BLOCK_N):
            entry, _k, v, scores = part_tile(
                start, q, position, first, last, shared, near, listed, means, sizes, scale,
                MEANS, D, DV, CAUSAL, BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_V, PRECISION,
            )  # fmt: skip
            top, mass, mixed, weight, shrink = add_entries(top, mass, mixed, scores, v, PRECISION)
            if RANK > 0:
                factor = load_column(means.factor, shared, entry, sizes.means, 0.0)
                bent = bent * shrink + tl.sum(weight * factor[None, :], 1)

    safe = tl.where(mass > 0, mass, 1.0)
    if RANK > 0:
        left = load_dense(means.left, shared, tl.arange(0, BLOCK_D), D, BLOCK_R, RANK)
        right = load_dense(means.right, shared, tl.arange(0, BLOCK_R), RANK, BLOCK_V, DV)
        along = dot(q, left, PRECISION) * scale
        mixed += bent[:, None] * dot(along.to(right.dtype), right, PRECISION)
        store_column(slope, head, row, sizes.queries, bent / safe)
    store_dense(output, head, row, sizes.queries, mixed / safe[:, None], BLOCK_V, DV)
    # A weight is exp2(score - log_mass): rows that see nothing have none, whatever the score.
    store_column(log_mass, head, row, sizes.queries, tl.where(mass > 0, top + tl.log2(safe), float("inf")))
