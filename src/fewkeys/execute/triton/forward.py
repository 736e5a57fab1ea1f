"""What a tile of queries sees, and the kernel that attends to it in one pass.

A program takes `BLOCK_M` queries of one head. It walks the band's keys, the shared list and the stand-ins, tile by
tile, with a running maximum and sum (in powers of two), so no score leaves the chip. All sums are float32.

Arguments come in the named tuples of `op`. Query i stands at position `i + offset` among the keys. What lies
outside a tensor is read as zeros.
"""

# Kernels are compiled from their source: Triton, which ships no types, gives the meaning of what they take.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

import triton
import triton.language as tl

from fewkeys.sketch.triton.tiles import dot, load_rows, store_rows

LOG2_E = tl.constexpr(1.4426950408889634)
ROUNDING = tl.constexpr(1e-5)
"""A stand-in vanishes where this share of its keys, or less, is left: that much may be rounding."""


@triton.jit
def query_base(near, sizes, head):
    """Where the rows of a query head begin; heads are counted through the batch, in int64."""
    strides = near.query_strides
    return near.query + head // sizes.heads * strides[0] + head % sizes.heads * strides[1]


@triton.jit
def key_bases(near, sizes, shared):
    """Where the keys and values of a key head begin; heads are counted through the batch, in int64."""
    kv_heads = sizes.heads // sizes.groups
    batch, own = shared // kv_heads, shared % kv_heads
    key = near.key + batch * near.key_strides[0] + own * near.key_strides[1]
    return key, near.value + batch * near.value_strides[0] + own * near.value_strides[1]


@triton.jit
def band_keys(first_row, last_row, sizes):
    """The first key in the band of queries `first_row .. last_row`, and the key after the last."""
    first = tl.maximum(first_row + sizes.offset - sizes.band_left, 0)
    return first, tl.minimum(last_row + sizes.offset + sizes.band_right + 1, sizes.keys)


@triton.jit
def in_band(position, place, sizes):
    """Which keys at `place` (N) lie in the band of the queries at `position` (M): (M, N)."""
    step = place[None, :] - position[:, None]
    return (step >= -sizes.band_left) & (step <= sizes.band_right) & (place < sizes.keys)[None, :]


@triton.jit
def band_scores(q, k, position, place, shared, near, sizes, scale, PRECISION: tl.constexpr):
    """Scores (M, N) in powers of two, -inf outside the band and for keys marked as hidden."""
    seen = in_band(position, place, sizes)
    if near.hidden is not None:
        hidden = tl.load(near.hidden + shared * sizes.keys + place, mask=place < sizes.keys, other=1)
        seen = seen & (hidden == 0)[None, :]
    return tl.where(seen, dot(q, tl.trans(k), PRECISION) * (scale * LOG2_E), float("-inf"))


@triton.jit
def list_scores(q, k, position, entry, shared, listed, sizes, scale, CAUSAL: tl.constexpr, PRECISION: tl.constexpr):
    """Scores (M, N) of the shared list; the place of fillings is after the last key."""
    place = tl.load(listed.place + shared * sizes.entries + entry, mask=entry < sizes.entries, other=sizes.keys)
    seen = (place < sizes.keys)[None, :]
    if CAUSAL:
        seen = seen & (place[None, :] <= position[:, None])
    return tl.where(seen, dot(q, tl.trans(k), PRECISION) * (scale * LOG2_E), float("-inf"))


@triton.jit
def unkept(position, entry, first, last, shared, means, sizes, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """For how many keys each stand-in speaks (M, N): its total less what the band's keys `first .. last - 1` hold.

    Shares are at most one. They are multiplied in two halves of float16, which together are exact to 2^-22.
    """
    held = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(first, last, BLOCK_N):
        place = start + tl.arange(0, BLOCK_N)
        at = shared * sizes.keys + place
        owner = tl.load(means.label + at, mask=place < sizes.keys, other=-1)
        share = tl.load(means.share + at, mask=place < sizes.keys, other=0.0)
        shares = tl.where(owner[:, None] == entry[None, :], share[:, None], 0.0)
        inside = in_band(position, place, sizes).to(tl.float16)
        upper = shares.to(tl.float16)
        lower = (shares - upper.to(tl.float32)).to(tl.float16)
        held += dot(inside, upper, "ieee") + dot(inside, lower, "ieee")
    total = tl.load(means.total + shared * sizes.means + entry, mask=entry < sizes.means, other=0.0)[None, :]
    return tl.where(total - held > total * ROUNDING, total - held, 0.0)


@triton.jit
def mean_scores(q, k, entry, count, shared, means, sizes, scale, PRECISION: tl.constexpr):
    """Scores (M, N) of stand-ins that speak for `count` keys, with the logarithm of the count; -inf for none."""
    bias = tl.load(means.bias + shared * sizes.means + entry, mask=entry < sizes.means, other=0.0)[None, :]
    scores = (dot(q, tl.trans(k), PRECISION) * scale + bias) * LOG2_E
    return tl.where(count > 0, scores + tl.log2(tl.where(count > 0, count, 1.0)), float("-inf"))


@triton.jit
def add_entries(top, mass, mixed, scores, value, PRECISION: tl.constexpr):
    """Join entries to rows' running maximum, sum and weighted values; also their weights, and how the old shrank."""
    new = tl.maximum(top, tl.max(scores, 1))
    shift = tl.where(new == float("-inf"), 0.0, new)
    weight = tl.exp2(scores - shift[:, None])
    shrink = tl.exp2(top - shift)
    mass = mass * shrink + tl.sum(weight, 1)
    mixed = mixed * shrink[:, None] + dot(weight.to(value.dtype), value, PRECISION)
    return new, mass, mixed, weight, shrink


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
    d = tl.arange(0, BLOCK_D)
    dv = tl.arange(0, BLOCK_V)
    q = load_rows(query_base(near, sizes, head), row, sizes.queries, near.query_strides[2], d, D)
    top = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    mass = tl.zeros((BLOCK_M,), tl.float32)
    mixed = tl.zeros((BLOCK_M, BLOCK_V), tl.float32)

    key, value = key_bases(near, sizes, shared)
    first, last = band_keys(first_row, tl.minimum(first_row + BLOCK_M, sizes.queries) - 1, sizes)
    for start in range(first, last, BLOCK_N):
        place = start + tl.arange(0, BLOCK_N)
        k = load_rows(key, place, sizes.keys, near.key_strides[2], d, D)
        v = load_rows(value, place, sizes.keys, near.value_strides[2], dv, DV)
        scores = band_scores(q, k, position, place, shared, near, sizes, scale, PRECISION)
        top, mass, mixed, _weight, _shrink = add_entries(top, mass, mixed, scores, v, PRECISION)
    if listed.key is not None:
        for start in range(0, sizes.entries, BLOCK_N):
            entry = start + tl.arange(0, BLOCK_N)
            k = load_rows(listed.key + shared * sizes.entries * D, entry, sizes.entries, D, d, D)
            v = load_rows(listed.value + shared * sizes.entries * DV, entry, sizes.entries, DV, dv, DV)
            scores = list_scores(q, k, position, entry, shared, listed, sizes, scale, CAUSAL, PRECISION)
            top, mass, mixed, _weight, _shrink = add_entries(top, mass, mixed, scores, v, PRECISION)
    bent = tl.zeros((BLOCK_M,), tl.float32)
    if means.key is not None:
        for start in range(0, sizes.means, BLOCK_N):
            entry = start + tl.arange(0, BLOCK_N)
            k = load_rows(means.key + shared * sizes.means * D, entry, sizes.means, D, d, D)
            v = load_rows(means.value + shared * sizes.means * DV, entry, sizes.means, DV, dv, DV)
            count = unkept(position, entry, first, last, shared, means, sizes, BLOCK_M, BLOCK_N)
            scores = mean_scores(q, k, entry, count, shared, means, sizes, scale, PRECISION)
            top, mass, mixed, weight, shrink = add_entries(top, mass, mixed, scores, v, PRECISION)
            if RANK > 0:
                factor = tl.load(means.factor + shared * sizes.means + entry, mask=entry < sizes.means, other=0.0)
                bent = bent * shrink + tl.sum(weight * factor[None, :], 1)

    safe = tl.where(mass > 0, mass, 1.0)
    if RANK > 0:
        r = tl.arange(0, BLOCK_R)
        left = load_rows(means.left + shared * D * RANK, d, D, RANK, r, RANK)
        right = load_rows(means.right + shared * RANK * DV, r, RANK, DV, dv, DV)
        along = dot(q, left, PRECISION) * scale
        mixed += bent[:, None] * dot(along.to(right.dtype), right, PRECISION)
        tl.store(slope + head * sizes.queries + row, bent / safe, mask=row < sizes.queries)
    store_rows(output + head * sizes.queries * DV, row, sizes.queries, DV, dv, DV, mixed / safe[:, None])
    # A weight is exp2(score - log_mass): rows that see nothing have none, whatever the score.
    logarithm = tl.where(mass > 0, top + tl.log2(safe), float("inf"))
    tl.store(log_mass + head * sizes.queries + row, logarithm, mask=row < sizes.queries)
