"""What the queries see of every key, the cluster of every key, and sums over clusters: `fewkeys.sketch.clusters`.

Arguments come in the named tuples of `op`; heads are counted through the batch, in int64. All sums are float32.

Tensor cores multiply 16-bit numbers at full speed. A float32 number cut into bfloat16 parts loses no range, and every
part adds 8 bits: two are right to 2^-17 of a number, three to all of its 24 bits. Keys of 16 bits meet centres in two
parts, an error beside which the rounding of the keys themselves is large. They meet the form in three, and sums take
three of every row: what the spread of a cluster's keys exceeds that of their mean is told from float32's rounding.

Experimental: run in Triton's interpreter, and on no device yet.
"""

# Kernels are compiled from their source: Triton, which ships no types, gives the meaning of what they take.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

import triton
import triton.language as tl

from fewkeys.sketch.triton.tiles import base_of, dot, load_rows, store_rows


@triton.jit
def products(x, matrix, row, rows, stride, column, columns, PARTS: tl.constexpr, PRECISION: tl.constexpr):
    """`x @ matrix^T` (N, R) for x (N, columns) and some rows of a matrix, which lies there in `PARTS` parts."""
    upper = x
    if x.dtype == tl.float16:
        # Its 11 bits are two parts; the product of both last parts is below the rounding of the others.
        upper = x.to(tl.bfloat16)
        rest = (x.to(tl.float32) - upper.to(tl.float32)).to(tl.bfloat16)
    found = tl.zeros((x.shape[0], row.shape[0]), tl.float32)
    for part in tl.static_range(PARTS):
        own = tl.trans(load_rows(matrix + part * rows * stride, row, rows, stride, column, columns))
        found += dot(upper, own, PRECISION)
        if x.dtype == tl.float16 and part < PARTS - 1:
            found += dot(rest, own, PRECISION)
    return found


@triton.jit
def survey(
    rows,
    seen,
    clusters,
    sizes,
    D: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr,
    FORM_PARTS: tl.constexpr,
    CENTRE_PARTS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """A program takes `BLOCK_N` keys and values of a head, and the rows of form and centres `BLOCK_R` at a time."""
    place = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    head = tl.program_id(1).to(tl.int64)
    at, real = head * sizes.keys + place, place < sizes.keys
    d = tl.arange(0, BLOCK_D)
    key = base_of(rows.key, rows.key_strides, head, sizes.heads)
    k = load_rows(key, place, sizes.keys, rows.key_strides[2], d, D)
    if seen.root is not None:
        shift = seen.shift + head * (D + 1)
        spread = tl.zeros((BLOCK_N,), tl.float32)
        for start in range(0, D, BLOCK_R):
            r = start + tl.arange(0, BLOCK_R)
            x = products(k, seen.root + head * (FORM_PARTS * D * D), r, D, D, d, D, FORM_PARTS, PRECISION)
            x -= tl.load(shift + r, mask=r < D, other=0.0)[None, :]
            spread += tl.sum(x * x, 1)
        query = tl.load(seen.query + head * D + d, mask=d < D, other=0.0)
        along = tl.sum(k.to(tl.float32) * query[None, :], 1) - tl.load(shift + D)
        tl.store(seen.spread + at, spread, mask=real)
        # k^T C k = E (q . k)^2 - (m . k)^2
        tl.store(seen.importance + at, along + 0.5 * (spread - along * along), mask=real)
    if clusters.centre is not None:
        dv = tl.arange(0, BLOCK_V)
        value = base_of(rows.value, rows.value_strides, head, sizes.heads)
        v = load_rows(value, place, sizes.keys, rows.value_strides[2], dv, DV)
        centre = clusters.centre + head * sizes.centres * (CENTRE_PARTS * (D + DV))
        nearest = tl.full((BLOCK_N,), float("-inf"), tl.float32)
        label = tl.zeros((BLOCK_N,), tl.int32)
        for start in range(0, sizes.centres, BLOCK_R):
            c = start + tl.arange(0, BLOCK_R)
            x = products(k, centre, c, sizes.centres, D + DV, d, D, CENTRE_PARTS, PRECISION)
            x += products(v, centre + D, c, sizes.centres, D + DV, dv, DV, CENTRE_PARTS, PRECISION)
            constant = clusters.constant + head * sizes.centres + c
            x += tl.load(constant, mask=c < sizes.centres, other=float("-inf"))[None, :]
            best, index = tl.max(x, 1, return_indices=True)  # of equals the first
            closer = best > nearest
            nearest = tl.where(closer, best, nearest)
            label = tl.where(closer, start + index, label)
        if clusters.middle is not None:
            middle = tl.load(clusters.middle + head * DV + dv, mask=dv < DV, other=0.0)
            off = v.to(tl.float32) - middle[None, :]
            tl.store(clusters.square + at, tl.sum(off * off, 1), mask=real)
        tl.store(clusters.nearest + at, nearest, mask=real)
        tl.store(clusters.label + at, label.to(tl.int64), mask=real)


@triton.jit
def add_chosen(total, chosen, rows):
    """`total + chosen @ rows` for `chosen` of zeros and ones."""
    for _part in tl.static_range(3):
        upper = rows.to(tl.bfloat16)
        total += dot(chosen, upper, "ieee")
        rows -= upper.to(tl.float32)
    return total


@triton.jit
def label_sums(
    rows,
    label,
    share,
    sizes,
    tiles,
    sums,
    D: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """A program adds up `tiles` tiles of a head's keys over `BLOCK_C` clusters: sums (parts, B H, C, D + DV)."""
    c = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    part = tl.program_id(1)
    head = tl.program_id(2).to(tl.int64)
    d = tl.arange(0, BLOCK_D)
    dv = tl.arange(0, BLOCK_V)
    key = base_of(rows.key, rows.key_strides, head, sizes.heads)
    value = base_of(rows.value, rows.value_strides, head, sizes.heads)
    on_key = tl.zeros((BLOCK_C, BLOCK_D), tl.float32)
    on_value = tl.zeros((BLOCK_C, BLOCK_V), tl.float32)
    first = part * tiles * BLOCK_N
    for start in range(first, tl.minimum(first + tiles * BLOCK_N, sizes.keys), BLOCK_N):
        place = start + tl.arange(0, BLOCK_N)
        at, real = head * sizes.keys + place, place < sizes.keys
        owner = tl.load(label + at, mask=real, other=-1)
        weight = tl.load(share + at, mask=real, other=0.0)[:, None]
        chosen = tl.where(owner[None, :] == c[:, None], 1.0, 0.0).to(tl.bfloat16)
        k = load_rows(key, place, sizes.keys, rows.key_strides[2], d, D)
        v = load_rows(value, place, sizes.keys, rows.value_strides[2], dv, DV)
        on_key = add_chosen(on_key, chosen, weight * k.to(tl.float32))
        on_value = add_chosen(on_value, chosen, weight * v.to(tl.float32))
    into = sums + (part * tl.num_programs(2) + head) * sizes.centres * (D + DV)
    store_rows(into, c, sizes.centres, D + DV, d, D, on_key)
    store_rows(into + D, c, sizes.centres, D + DV, dv, DV, on_value)
