"""The patterns, hashes and clusters that Sparsefinder is compared with: selectors like those of the package."""

from experiments.sparsefinder.baselines.bigbird import BigBird as BigBird
from experiments.sparsefinder.baselines.longformer import Longformer as Longformer
from experiments.sparsefinder.baselines.low_rank import LowRankEntmax as LowRankEntmax
from experiments.sparsefinder.baselines.reformer import Reformer as Reformer
from experiments.sparsefinder.baselines.routing import Routing as Routing
from experiments.sparsefinder.baselines.sorted_lsh import SortedLSH as SortedLSH
from experiments.sparsefinder.baselines.sparse_transformer import Fixed as Fixed, Strided as Strided
