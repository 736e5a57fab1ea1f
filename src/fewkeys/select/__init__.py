"""Who is kept: one file per idea. Each selector turns a problem into a `fewkeys.core.graph.Graph`."""

from typing import Any

from fewkeys.select.base import Selector, Union
from fewkeys.select.baselines import (
    BigBird,
    Fixed,
    Longformer,
    LowRankEntmax,
    RandomEdges,
    Reformer,
    Routing,
    SortedLSH,
    Strided,
)
from fewkeys.select.block_clusters import BlockClusters
from fewkeys.select.controls import KeyNorm, RandomKeys
from fewkeys.select.entmax_support import EntmaxSupport
from fewkeys.select.global_tokens import GlobalTokens
from fewkeys.select.groupings import GROUPINGS, Buckets, ClusterPairs, Clusters, Distance, Edges, Grouping, Joined
from fewkeys.select.leverage import Leverage
from fewkeys.select.outliers import Outliers
from fewkeys.select.predicted import Predicted
from fewkeys.select.projection import Centroids, Projection
from fewkeys.select.recent import RecentBlocks
from fewkeys.select.top_k import BestColumns, TopK
from fewkeys.select.window import Sinks, Window

SELECTORS: tuple[type[Selector], ...] = (
    Window,
    Sinks,
    Leverage,
    KeyNorm,
    RandomKeys,
    TopK,
    BestColumns,
    Outliers,
    RecentBlocks,
    GlobalTokens,
    Longformer,
    BigBird,
    Strided,
    Fixed,
    Reformer,
    SortedLSH,
    Routing,
    LowRankEntmax,
    RandomEdges,
    EntmaxSupport,
    Predicted,
    BlockClusters,
)
"""The catalogue: selectors that plans can save and load by name."""
PARTS: tuple[type[Any], ...] = (*GROUPINGS, Projection, Centroids, Edges, Joined)
"""What those selectors may hold."""

__all__ = [
    "GROUPINGS",
    "PARTS",
    "SELECTORS",
    "BestColumns",
    "BigBird",
    "BlockClusters",
    "Buckets",
    "Centroids",
    "ClusterPairs",
    "Clusters",
    "Distance",
    "Edges",
    "EntmaxSupport",
    "Fixed",
    "GlobalTokens",
    "Grouping",
    "Joined",
    "KeyNorm",
    "Leverage",
    "Longformer",
    "LowRankEntmax",
    "Outliers",
    "Predicted",
    "Projection",
    "RandomEdges",
    "RandomKeys",
    "RecentBlocks",
    "Reformer",
    "Routing",
    "Selector",
    "Sinks",
    "SortedLSH",
    "Strided",
    "TopK",
    "Union",
    "Window",
]
