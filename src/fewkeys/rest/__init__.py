"""What is said of the keys that are not kept."""

from fewkeys.rest.base import Drop, Rest, StandIns
from fewkeys.rest.cluster_means import ClusterMeans
from fewkeys.rest.moments import Moments
from fewkeys.rest.uniform_sample import UniformSample

RESTS: tuple[type[Rest], ...] = (Drop, ClusterMeans, Moments, UniformSample)
"""The catalogue: rests that plans can save and load by name."""

__all__ = ["RESTS", "ClusterMeans", "Drop", "Moments", "Rest", "StandIns", "UniformSample"]
