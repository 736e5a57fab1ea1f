"""Random numbers from the generator of the call, independent of the data."""

from __future__ import annotations

import torch
from torch import Tensor

from fewkeys.core.inputs import Inputs
from fewkeys.select.controls import uniform


def normal(inputs: Inputs, shape: tuple[int, ...], template: Tensor) -> Tensor:
    """Standard normal numbers from the call's generator (seed 0 without one), in dtype and device of `template`.

    Drawn in float32, so that a seed means the same in every dtype.
    """
    generator = inputs.generator or torch.Generator("cpu").manual_seed(0)
    return torch.randn(shape, generator=generator, device=generator.device, dtype=torch.float32).to(template)


def distinct(inputs: Inputs, total: Tensor, rows: int, count: int) -> Tensor:
    """For every sequence, key head and row, `count` distinct numbers of 0 .. total - 1, each subset equally likely.

    `total` broadcasts to (B, 1, rows). Returns int64 (B, Hkv, rows, count), -1 in unused places if a total is below
    `count`. Floyd's algorithm: O(count^2) per row for any total.
    """
    draws = uniform(inputs, (inputs.batch, inputs.kv_heads, rows, count)).double()
    chosen = torch.full(draws.shape, -1, dtype=torch.int64, device=draws.device)
    for step in range(count):
        last = total - count + step
        number = (draws[..., step] * (last + 1)).long()
        # A number that is taken is replaced by the largest, which cannot be taken yet.
        taken = (chosen[..., :step] == number.unsqueeze(-1)).any(-1)
        chosen[..., step] = torch.where(taken, last, number).where(last >= 0, -1)
    return chosen
