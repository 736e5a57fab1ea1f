"""Sparsefinder (arXiv 2109.12188): predicting the graph of sparse attention. A line here makes classes public."""

from fewkeys.core.rooms import public_names
from fewkeys.papers.sparsefinder.evaluate import GraphScores as GraphScores
from fewkeys.papers.sparsefinder.evaluate import score_graphs as score_graphs
from fewkeys.papers.sparsefinder.groupings import BlockClusters as BlockClusters
from fewkeys.papers.sparsefinder.groupings import Buckets as Buckets
from fewkeys.papers.sparsefinder.groupings import ClusterPairs as ClusterPairs
from fewkeys.papers.sparsefinder.groupings import Clusters as Clusters
from fewkeys.papers.sparsefinder.groupings import Distance as Distance
from fewkeys.papers.sparsefinder.groupings import Grouping as Grouping
from fewkeys.papers.sparsefinder.groups import Groups as Groups
from fewkeys.papers.sparsefinder.patterns import EntmaxSupport as EntmaxSupport
from fewkeys.papers.sparsefinder.patterns import GlobalTokens as GlobalTokens
from fewkeys.papers.sparsefinder.patterns import RandomEdges as RandomEdges
from fewkeys.papers.sparsefinder.space import Centroids as Centroids
from fewkeys.papers.sparsefinder.space import Edges as Edges
from fewkeys.papers.sparsefinder.space import Joined as Joined
from fewkeys.papers.sparsefinder.space import Projection as Projection
from fewkeys.papers.sparsefinder.sparsefinder import Sparsefinder as Sparsefinder


def __dir__() -> list[str]:
    return public_names(globals())
