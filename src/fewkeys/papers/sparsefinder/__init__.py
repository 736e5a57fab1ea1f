"""Sparsefinder (arXiv 2109.12188): predicting the graph of sparse attention. A line here makes classes public."""

from fewkeys.core.rooms import public_names
from fewkeys.papers.sparsefinder.evaluate import GraphScores as GraphScores, score_graphs as score_graphs
from fewkeys.papers.sparsefinder.groupings import (
    BlockClusters as BlockClusters,
    Buckets as Buckets,
    ClusterPairs as ClusterPairs,
    Clusters as Clusters,
    Distance as Distance,
    Grouping as Grouping,
)
from fewkeys.papers.sparsefinder.groups import Groups as Groups
from fewkeys.papers.sparsefinder.patterns import (
    EntmaxSupport as EntmaxSupport,
    GlobalTokens as GlobalTokens,
    RandomEdges as RandomEdges,
)
from fewkeys.papers.sparsefinder.space import (
    Centroids as Centroids,
    Edges as Edges,
    Joined as Joined,
    Projection as Projection,
)
from fewkeys.papers.sparsefinder.sparsefinder import Sparsefinder as Sparsefinder


def __dir__() -> list[str]:
    return public_names(globals())
