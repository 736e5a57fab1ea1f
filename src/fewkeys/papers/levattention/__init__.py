"""LevAttention (arXiv 2410.05462): sets of keys that have every large entry of attention, for all queries.

The selector by leverage scores is `fewkeys.select.Leverage`; `Sensitivity` is that for other powers.
"""

from fewkeys.core.rooms import public_names
from fewkeys.papers.levattention.key_sketch import KeySketch as KeySketch, UniversalKeys as UniversalKeys
from fewkeys.papers.levattention.search import HeavyEntries as HeavyEntries, heavy_entries as heavy_entries
from fewkeys.papers.levattention.universal import (
    Sensitivity as Sensitivity,
    leverage_scores as leverage_scores,
    shard_scores as shard_scores,
    shard_set as shard_set,
    universal_set as universal_set,
)


def __dir__() -> list[str]:
    return public_names(globals())
