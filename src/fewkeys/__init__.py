"""fewkeys: attention with few keys."""

from fewkeys import oracle
from fewkeys.attention import attention
from fewkeys.graph import Graph
from fewkeys.measure import metrics
from fewkeys.plan import Plan, budget
from fewkeys.rest import ClusterMeans, Drop, Moments, UniformSample
from fewkeys.select import BestColumns, KeyNorm, Leverage, Outliers, RandomKeys, Sinks, TopK, Window
from fewkeys.sketch.leverage import leverage_scores, universal_set
from fewkeys.weights import Elu, Entmax, Power, Relu, Softmax
