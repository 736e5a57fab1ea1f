"""Rescaling of inputs whose squares would overflow.

Attention is the same for keys k / b and queries q b, and linear in the values; powers of two scale without rounding.
Scores at which neighbouring floats are over 64 apart are scaled down: one key has all the weight in either case.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from fewkeys.core.inputs import Inputs
from fewkeys.core.precision import widened, working, working_dtype
from fewkeys.core.totals import Totals

LARGEST = 40
"""log2 of the largest query, key or value: sums of 2^47 squares of them are safe in float32."""
STRONGEST = {torch.float32: 30, torch.float64: 59}
"""log2 of the score at which neighbouring floats are 64 or more apart."""
FINITE = {torch.float32: 120, torch.float64: 1000}
"""log2 of scores that do not overflow, for attention that computes no statistics of them."""


def needs_rescaling(largest: Sequence[float], scale: float, dim: int, dtype: torch.dtype) -> bool:
    """Whether the largest entries of queries, keys and values, in the working `dtype`, require rescaling; True for NaN
    and infinity.
    """
    query, key, value = largest
    scaled = query * max(1.0, abs(scale))  # Python's floats are float64
    are_small = all(entry <= 2.0**LARGEST for entry in (scaled, key, value))
    return not (are_small and scaled * min(1.0, abs(scale)) * key * dim <= 2.0 ** STRONGEST[dtype])


def rescaled(
    inputs: Inputs, strongest: Mapping[torch.dtype, int] = STRONGEST
) -> tuple[Inputs, Callable[[Tensor], Tensor]]:
    """The problem, rescaled if it must be, and a function from its output to that of the inputs, in their dtype.

    The power of two in the scale moves to the queries: squares of scaled queries must not overflow either. float16
    becomes float32 on a CPU and where it must be rescaled. strongest: log2 of the largest scores.
    """
    x, dtype = inputs, inputs.query.dtype
    if dtype == torch.float16 and (x.needs_rescaling or x.query.device.type == "cpu"):
        convert = Tensor.float if x.needs_rescaling else widened
        x = replace(x, query=convert(x.query), key=convert(x.key), value=convert(x.value), _memory={})
    if not x.needs_rescaling:
        return x, lambda output: output.to(dtype)
    with torch.no_grad():
        whole = x.whole.totals
        query = _exponent(x.grouped_query())
        key, value = (_largest(_exponent(rows).unsqueeze(2), whole) for rows in (x.key, x.value))
        scale, power = math.frexp(x.scale)
        query, dim = query + power, math.ceil(math.log2(x.head_dim))
        excess = (query + key.unsqueeze(2) + dim - strongest[working_dtype(x.query.dtype)]).clamp_min(0)
        far = (_largest(torch.maximum(query - LARGEST, excess), whole) > 0) | (key > LARGEST)
        down = key.where(far, 0)
        up = (power + down.unsqueeze(2) - excess).flatten(1, 2)
        unit = value.where(value > LARGEST, 0)
    # Kernels multiply means in bfloat16, too, and those of first-order terms are then as large as the scores.
    impl = "torch" if x.impl == "auto" and dtype == torch.bfloat16 else x.impl
    query, key, value = _scaled(x.query, up), _scaled(x.key, -down), _scaled(x.value, -unit)
    in_units = replace(x, query=query, key=key, value=value, scale=scale, impl=impl, needs_rescaling=False, _memory={})
    factor = _power(unit.repeat_interleave(x.gqa_ratio, 1), x.value)
    return in_units, lambda output: (output * factor).to(dtype)


def _exponent(rows: Tensor) -> Tensor:
    """The least e >= -100 (..., 1) with |entries| <= 2^e of every row (..., D)."""
    largest = working(rows.detach()).abs().amax(-1, keepdim=True)
    return largest.clamp_min(2.0**-100).log2().ceil().long()


def _largest(exponent: Tensor, totals: Totals) -> Tensor:
    """The largest exponent (B, Hkv, 1, 1) of rows (B, Hkv, groups, N, 1), those of all processes; at least -100."""
    return totals.max(pad(exponent.flatten(2), (0, 1), value=-100).amax(-1)[..., None, None])


def _power(exponent: Tensor, template: Tensor) -> Tensor:
    return torch.ldexp(torch.ones_like(exponent, dtype=template.dtype), exponent)


def _scaled(rows: Tensor, exponent: Tensor) -> Tensor:
    """Rows times 2^exponent, in two steps, since one power could overflow."""
    half = exponent // 2
    return rows * _power(half, rows) * _power(exponent - half, rows)
