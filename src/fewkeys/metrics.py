"""How good a set of edges, or an output, is."""

from fewkeys.core.metrics import (
    exact_fraction as exact_fraction,
    mass as mass,
    output_error as output_error,
    recall as recall,
    relative_error as relative_error,
    sparsity as sparsity,
)
from fewkeys.core.rooms import public_names


def __dir__() -> list[str]:
    return public_names(globals())
