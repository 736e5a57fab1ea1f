"""Attention with few keys: keep the keys that matter, summarise the rest, measure the error of the output.

    keep     which keys each query attends to exactly        Window, Sinks, Leverage, Outliers, KeyNorm, RandomKeys;
                                                             oracles TopK, BestColumns; `a | b` keeps what either keeps
    rest     what stands in for all the other keys           Drop, ClusterMeans, Moments, UniformSample
    weights  how scores become weights                       Softmax, Entmax, Power, Elu, Relu
    slots    what a query pays                               kept keys plus stand-ins, in units of one key

`attention` runs a plan, `budget` recommends one, `tune` fits one to a model. `capture`, `compare` and `apply` judge and
run plans in a Hugging Face model, `spot_check` watches them there. `Sparsefinder` learns to predict which keys entmax
heads will use.
"""

from fewkeys import distributed, oracle
from fewkeys.attention import attention
from fewkeys.captures.capture import Capture
from fewkeys.core import metrics
from fewkeys.core.graph import Graph
from fewkeys.core.groups import Groups
from fewkeys.core.weights import Elu, Entmax, Power, Relu, Softmax
from fewkeys.cost.explain import Explanation, explain
from fewkeys.guard.fallback import Fallbacks, Guard
from fewkeys.heavy import HeavyEntries, Sketched, heavy_entries
from fewkeys.integrations.cache import cache
from fewkeys.integrations.compare import compare
from fewkeys.integrations.spot_check import spot_check
from fewkeys.integrations.transformers import apply, capture
from fewkeys.integrations.warm_start import WarmStart
from fewkeys.judge.result import Report
from fewkeys.judge.spot_check import SpotCheck
from fewkeys.model_plan import ModelPlan
from fewkeys.plan import Plan, budget
from fewkeys.predict import Sparsefinder
from fewkeys.rest import ClusterMeans, Drop, GroupMeans, Moments, RunningMeans, UniformSample
from fewkeys.select import (
    BestColumns,
    BigBird,
    BlockClusters,
    Buckets,
    Centroids,
    ClusterPairs,
    Clusters,
    Distance,
    EntmaxSupport,
    Fixed,
    GlobalTokens,
    KeyNorm,
    Leverage,
    Longformer,
    LowRankEntmax,
    Outliers,
    Predicted,
    Projection,
    RandomEdges,
    RandomKeys,
    RecentBlocks,
    Reformer,
    Routing,
    Sinks,
    SortedLSH,
    Strided,
    TopK,
    Window,
)
from fewkeys.sketch.key_sketch import KeySketch, UniversalKeys
from fewkeys.sketch.leverage import leverage_scores, universal_set
from fewkeys.streaming import Stream, stream
from fewkeys.tuning.tune import tune

__version__ = "0.1.0"

__all__ = [
    "BestColumns",
    "BigBird",
    "BlockClusters",
    "Buckets",
    "Capture",
    "Centroids",
    "ClusterMeans",
    "ClusterPairs",
    "Clusters",
    "Distance",
    "Drop",
    "Elu",
    "Entmax",
    "EntmaxSupport",
    "Explanation",
    "Fallbacks",
    "Fixed",
    "GlobalTokens",
    "Graph",
    "GroupMeans",
    "Groups",
    "Guard",
    "HeavyEntries",
    "KeyNorm",
    "KeySketch",
    "Leverage",
    "Longformer",
    "LowRankEntmax",
    "ModelPlan",
    "Moments",
    "Outliers",
    "Plan",
    "Power",
    "Predicted",
    "Projection",
    "RandomEdges",
    "RandomKeys",
    "RecentBlocks",
    "Reformer",
    "Relu",
    "Report",
    "Routing",
    "RunningMeans",
    "Sinks",
    "Sketched",
    "Softmax",
    "SortedLSH",
    "Sparsefinder",
    "SpotCheck",
    "Stream",
    "Strided",
    "TopK",
    "UniformSample",
    "UniversalKeys",
    "WarmStart",
    "Window",
    "apply",
    "attention",
    "budget",
    "cache",
    "capture",
    "compare",
    "distributed",
    "explain",
    "heavy_entries",
    "leverage_scores",
    "metrics",
    "oracle",
    "spot_check",
    "stream",
    "tune",
    "universal_set",
]
