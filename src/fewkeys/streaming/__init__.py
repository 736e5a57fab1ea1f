"""Attention over endless streams: what a causal plan remembers, and no more."""

from fewkeys.streaming.stream import Stream, stream

__all__ = ["Stream", "stream"]
