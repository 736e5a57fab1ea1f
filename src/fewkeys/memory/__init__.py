"""The past of streams and caches: what a causal plan remembers, and no more."""

from fewkeys.memory.stream import Stream, stream

__all__ = ["Stream", "stream"]
