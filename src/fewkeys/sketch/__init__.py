"""What is remembered of keys: Gram matrices, leverage scores, streams of keys, query moments, clusters."""

from fewkeys.sketch.key_sketch import KeySketch, UniversalKeys
from fewkeys.sketch.leverage import leverage_scores, universal_set

__all__ = ["KeySketch", "UniversalKeys", "leverage_scores", "universal_set"]
