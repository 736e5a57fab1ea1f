"""Three published lines of work, built on the public parts. Only commands import them.

levattention   universal sets, streams of keys, every large entry of an attention matrix
sparsefinder   predicting the graph of sparse attention; the patterns it is compared with; groups of tokens
value_aware    the best that a class of methods could do, given the values
"""

from fewkeys.papers import levattention as levattention
from fewkeys.papers import sparsefinder as sparsefinder
from fewkeys.papers import value_aware as value_aware


def __dir__() -> list[str]:
    return ["levattention", "sparsefinder", "value_aware"]
