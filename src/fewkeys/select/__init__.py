"""Who is kept: one file per idea. Each selector turns a problem into a `fewkeys.core.graph.Graph`.

A line here makes a file's classes public, loadable by name and part of every law (`fewkeys.core.catalogue`).
"""

from fewkeys.select.base import SELECTORS as SELECTORS
from fewkeys.select.base import Selector as Selector
from fewkeys.select.base import Union as Union
from fewkeys.select.base import united as united
from fewkeys.select.baselines.bigbird import BigBird as BigBird
from fewkeys.select.baselines.longformer import Longformer as Longformer
from fewkeys.select.baselines.low_rank import LowRankEntmax as LowRankEntmax
from fewkeys.select.baselines.random_edges import RandomEdges as RandomEdges
from fewkeys.select.baselines.reformer import Reformer as Reformer
from fewkeys.select.baselines.routing import Routing as Routing
from fewkeys.select.baselines.sorted_lsh import SortedLSH as SortedLSH
from fewkeys.select.baselines.sparse_transformer import Fixed as Fixed
from fewkeys.select.baselines.sparse_transformer import Strided as Strided
from fewkeys.select.block_clusters import BlockClusters as BlockClusters
from fewkeys.select.controls import KeyNorm as KeyNorm
from fewkeys.select.controls import RandomKeys as RandomKeys
from fewkeys.select.entmax_support import EntmaxSupport as EntmaxSupport
from fewkeys.select.global_tokens import GlobalTokens as GlobalTokens
from fewkeys.select.groupings import GROUPINGS as GROUPINGS
from fewkeys.select.groupings import PARTS as PARTS
from fewkeys.select.groupings import Buckets as Buckets
from fewkeys.select.groupings import ClusterPairs as ClusterPairs
from fewkeys.select.groupings import Clusters as Clusters
from fewkeys.select.groupings import Distance as Distance
from fewkeys.select.groupings import Edges as Edges
from fewkeys.select.groupings import Grouping as Grouping
from fewkeys.select.groupings import Joined as Joined
from fewkeys.select.key_scan import KeyScan as KeyScan
from fewkeys.select.leverage import Leverage as Leverage
from fewkeys.select.outliers import Outliers as Outliers
from fewkeys.select.predicted import Predicted as Predicted
from fewkeys.select.projection import Centroids as Centroids
from fewkeys.select.projection import Projection as Projection
from fewkeys.select.recent import RecentBlocks as RecentBlocks
from fewkeys.select.top_k import BestColumns as BestColumns
from fewkeys.select.top_k import TopK as TopK
from fewkeys.select.window import Sinks as Sinks
from fewkeys.select.window import Window as Window
