"""Statistics are computed once for each call, by compiled kernels or by torch's operations."""

from collections.abc import Callable
from functools import wraps
from typing import TypeVar, TypeVarTuple

from fewkeys.core.derivatives import constants
from fewkeys.core.impl import COMPILED
from fewkeys.core.inputs import Inputs
from fewkeys.native import tensors

Result = TypeVar("Result")
Args = TypeVarTuple("Args")


def statistic(compute: Callable[[Inputs, *Args], Result]) -> Callable[[Inputs, *Args], Result]:
    """Decorator: `inputs` remember the result, under the function and its other arguments, as a constant."""

    @wraps(compute)
    def remembered(inputs: Inputs, *args: *Args) -> Result:
        def constant() -> Result:
            with constants():
                return compute(inputs, *args)

        return inputs.remember((remembered, *args), constant)

    return remembered


def compiled_at_once(inputs: Inputs) -> bool:
    """Whether compiled kernels, which know no sums over processes, compute statistics."""
    if inputs.shard is not None or inputs.impl not in COMPILED:
        return False
    return inputs.remember(tensors.readable, lambda: tensors.readable(inputs.query, inputs.key, inputs.value))
