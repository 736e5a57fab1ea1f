"""Numbers so large that their squares are none any more: the same problem in other units.

Attention does not change when keys become k / b and queries q b, and its output is linear in the values, so every head
may have units of its own; powers of two change no bit. Nor does it matter how strong the strongest score is, once the
next smaller float beside it is 64 further away: then one key has all the weight. So scores are brought down to that.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from fewkeys.core.inputs import Inputs
from fewkeys.core.precision import working

LARGEST = 40
"""log2 of the largest query, key or value of which sums of squares are safe in float32 for 2^47 of them."""
STRONGEST = {torch.float32: 30, torch.float64: 59}
"""log2 of the strongest score that says anything: its neighbours among the floats are 64 away, or more."""


def needs_rescaling(largest: Sequence[float], scale: float, dim: int, dtype: torch.dtype) -> bool:
    """Whether the largest query, key and value ask for other units. `dtype`: the working one."""
    query, key, value = largest
    scaled = query * max(1.0, abs(scale))  # Python's floats reach further
    return max(scaled, key, value) > 2.0**LARGEST or scaled * min(1.0, abs(scale)) * key * dim > 2.0 ** STRONGEST[dtype]


def rescaled(inputs: Inputs) -> tuple[Inputs, Tensor | None]:
    """The problem in units that suit every head, and the unit (B, Hq, 1, 1) of the output; as it is, and None, where
    all entries are small enough.

    The power of two in the scale goes to the queries: squares of scaled queries need a float, too.
    """
    x = inputs
    if not x.needs_rescaling:
        return x, None
    with torch.no_grad():
        query, key, value = (_exponent(rows) for rows in (x.grouped_query(), x.key, x.value))
        scale, power = math.frexp(x.scale)
        query = query + power
        excess = (query + key + math.ceil(math.log2(x.head_dim)) - STRONGEST[working(x.query[:0]).dtype]).clamp_min(0)
        far = (query > LARGEST) | (key > LARGEST) | (excess > 0)
        down = key.where(far, 0)
        up = (power + down - excess).repeat_interleave(x.gqa_ratio, 1)
        unit = value.where(value > LARGEST, 0)
    # Kernels multiply means in bfloat16, too, and those of first-order terms are then as large as the scores.
    impl = "torch" if x.impl == "auto" and x.query.dtype == torch.bfloat16 else x.impl
    in_units = replace(
        x,
        impl=impl,
        query=_scaled(x.query, up),
        key=_scaled(x.key, -down),
        value=_scaled(x.value, -unit),
        scale=scale,
        needs_rescaling=False,
        _memory={},
    )
    return in_units, _power(unit.repeat_interleave(x.gqa_ratio, 1), x.value)


def _exponent(rows: Tensor) -> Tensor:
    """(B, H): the least e with |entries| <= 2^e, at least -100, of rows (B, H, ..., D)."""
    largest = working(rows.detach()).abs().flatten(2).amax(-1)
    return largest.clamp_min(2.0**-100).log2().ceil().long()


def _power(exponent: Tensor, like: Tensor) -> Tensor:
    return torch.ldexp(torch.ones_like(exponent, dtype=like.dtype), exponent)[:, :, None, None]


def _scaled(rows: Tensor, exponent: Tensor) -> Tensor:
    """In two steps: one power may be beyond what a float holds."""
    half = exponent // 2
    return rows * _power(half, rows) * _power(exponent - half, rows)
