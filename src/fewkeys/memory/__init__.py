"""The memory of streams and caches: what a causal plan keeps of earlier tokens."""

from fewkeys.memory.stream import Stream, stream

__all__ = ["Stream", "stream"]
