"""What is said of the keys that are not kept."""

from fewkeys.rest.base import BlockStandIns, Drop, Rest, StandIns
from fewkeys.rest.cluster_means import ClusterMeans
from fewkeys.rest.group_means import GroupMeans
from fewkeys.rest.moments import Moments
from fewkeys.rest.running_means import RunningMeans
from fewkeys.rest.uniform_sample import UniformSample

RESTS: tuple[type[Rest], ...] = (Drop, ClusterMeans, GroupMeans, Moments, RunningMeans, UniformSample)
"""The catalogue: rests that plans can save and load by name."""

__all__ = [
    "RESTS",
    "BlockStandIns",
    "ClusterMeans",
    "Drop",
    "GroupMeans",
    "Moments",
    "Rest",
    "RunningMeans",
    "StandIns",
    "UniformSample",
]
