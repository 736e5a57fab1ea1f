"""Whether the statistics of keys are computed by compiled kernels or by torch's operations."""

from __future__ import annotations

from torch import Tensor

import fewkeys.native as native
from fewkeys.core.impl import COMPILED, Impl
from fewkeys.core.inputs import Inputs


def compiled(impl: Impl, *tensors: Tensor) -> bool:
    """Whether compiled kernels read these tensors: `impl` allows it, and no gradient is needed."""
    return impl in COMPILED and native.suits(*tensors)


def compiled_at_once(inputs: Inputs, *tensors: Tensor) -> bool:
    """Whether one compiled kernel may do several steps: there are no other processes' sums to add in between."""
    return inputs.shard is None and compiled(inputs.impl, *tensors)
