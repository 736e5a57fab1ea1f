"""What stands in for the keys that are not kept: one file per idea. A line here makes a file's classes public."""

from fewkeys.core.rooms import public_names
from fewkeys.rest.base import (
    AnyStandIns as AnyStandIns,
    BlockStandIns as BlockStandIns,
    Drop as Drop,
    RangeStandIns as RangeStandIns,
    Rest as Rest,
    StandIns as StandIns,
)
from fewkeys.rest.block_means import BlockMeans as BlockMeans
from fewkeys.rest.cluster_means import ClusterMeans as ClusterMeans
from fewkeys.rest.running_means import RunningMeans as RunningMeans
from fewkeys.rest.uniform_sample import UniformSample as UniformSample


def __dir__() -> list[str]:
    return public_names(globals())
