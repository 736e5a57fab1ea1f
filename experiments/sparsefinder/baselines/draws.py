"""Random numbers from the generator of the call, independent of the data."""

from __future__ import annotations

import torch
from torch import Tensor

from fewkeys.core.inputs import Inputs


def normal(inputs: Inputs, shape: tuple[int, ...], template: Tensor) -> Tensor:
    """Standard normal numbers from the call's generator (seed 0 without one), in dtype and device of `template`.

    Drawn in float32, so that a seed means the same in every dtype.
    """
    generator = inputs.generator or torch.Generator("cpu").manual_seed(0)
    return torch.randn(shape, generator=generator, device=generator.device, dtype=torch.float32).to(template)
