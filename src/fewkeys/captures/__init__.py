"""Queries, keys and values taken from a model: in memory, or as a folder of files."""

from fewkeys.captures.capture import Capture

__all__ = ["Capture"]
