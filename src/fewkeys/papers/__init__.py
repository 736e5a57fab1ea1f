"""Three papers, built on the public parts. Only commands import them.

levattention   universal sets, streams of keys, every large entry of an attention matrix
sparsefinder   predicting the graph of sparse attention; baseline patterns; groups of tokens
value_aware    oracles: the best approximation in a class of methods, given the values
"""

from fewkeys.papers import levattention as levattention, sparsefinder as sparsefinder, value_aware as value_aware


def __dir__() -> list[str]:
    return ["levattention", "sparsefinder", "value_aware"]
