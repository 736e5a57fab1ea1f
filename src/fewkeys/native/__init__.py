"""Compiled kernels for the CPU: they do in one pass over memory what torch's operations do in many.

They are C++ of this package, which `build` finds or compiles. Gradients are those of torch's operations
(`core.derivatives`). Without kernels torch does the same work with the same results up to rounding (`impl="native"`
refuses). `FEWKEYS_NATIVE=0` in the environment turns them off.
"""

from fewkeys.native.build import counters, instruction_set, missing
from fewkeys.native.kernels import (
    best,
    best_codes,
    cluster,
    code_keys,
    cohort_means,
    frame,
    halve,
    largest_and_rows,
    tilt,
)
from fewkeys.native.tensors import readable, suits

__all__ = [
    "best",
    "best_codes",
    "cluster",
    "code_keys",
    "cohort_means",
    "counters",
    "frame",
    "halve",
    "instruction_set",
    "largest_and_rows",
    "missing",
    "readable",
    "suits",
    "tilt",
]
