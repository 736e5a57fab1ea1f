"""How good a set of edges, or an output, is."""

from fewkeys.core.metrics import exact_fraction as exact_fraction
from fewkeys.core.metrics import mass as mass
from fewkeys.core.metrics import output_error as output_error
from fewkeys.core.metrics import recall as recall
from fewkeys.core.metrics import relative_error as relative_error
from fewkeys.core.metrics import sparsity as sparsity
from fewkeys.core.rooms import public_names
from fewkeys.judge.error_bars import ErrorBars as ErrorBars
from fewkeys.judge.error_bars import error_bars as error_bars


def __dir__() -> list[str]:
    return public_names(globals())
