"""All entries `A_ij >= eps` of attention with weights `|s|^p`, without the n x n matrix: exact, or from sketches."""

from fewkeys.heavy.entries import HeavyEntries
from fewkeys.heavy.search import heavy_entries
from fewkeys.heavy.sketched import Sketched

__all__ = ["HeavyEntries", "Sketched", "heavy_entries"]
