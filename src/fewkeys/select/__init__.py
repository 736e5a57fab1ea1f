"""Who is kept: one file per idea. Each selector turns a problem into a `fewkeys.graph.Graph`."""

from fewkeys.select.base import Selector, Union
from fewkeys.select.controls import KeyNorm, RandomKeys
from fewkeys.select.leverage import Leverage
from fewkeys.select.outliers import Outliers
from fewkeys.select.recent import RecentBlocks
from fewkeys.select.top_k import BestColumns, TopK
from fewkeys.select.window import Sinks, Window

SELECTORS: tuple[type[Selector], ...] = (
    Window,
    Sinks,
    Leverage,
    KeyNorm,
    RandomKeys,
    TopK,
    BestColumns,
    Outliers,
    RecentBlocks,
)
"""The catalogue: selectors that plans can save and load by name."""

__all__ = [
    "SELECTORS",
    "BestColumns",
    "KeyNorm",
    "Leverage",
    "Outliers",
    "RandomKeys",
    "RecentBlocks",
    "Selector",
    "Sinks",
    "TopK",
    "Union",
    "Window",
]
