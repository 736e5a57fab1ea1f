"""Published attention patterns, each in its paper's own terms: what a selector has to beat."""

from fewkeys.select.baselines.bigbird import BigBird
from fewkeys.select.baselines.longformer import Longformer
from fewkeys.select.baselines.low_rank import LowRankEntmax
from fewkeys.select.baselines.random_edges import RandomEdges
from fewkeys.select.baselines.reformer import Reformer
from fewkeys.select.baselines.routing import Routing
from fewkeys.select.baselines.sorted_lsh import SortedLSH
from fewkeys.select.baselines.sparse_transformer import Fixed, Strided

__all__ = [
    "BigBird",
    "Fixed",
    "Longformer",
    "LowRankEntmax",
    "RandomEdges",
    "Reformer",
    "Routing",
    "SortedLSH",
    "Strided",
]
