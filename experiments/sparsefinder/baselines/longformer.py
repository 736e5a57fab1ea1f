"""A window and global tokens."""

from __future__ import annotations

from dataclasses import dataclass

from fewkeys.core.graph import Graph
from fewkeys.core.inputs import Inputs
from fewkeys.core.validation import check_count
from fewkeys.core.work import Work
from fewkeys.papers.sparsefinder.patterns import GlobalTokens
from fewkeys.select.base import Selector
from fewkeys.select.window import Window


@dataclass(frozen=True)
class Longformer(Selector, listed=True):
    """(i, j) is an edge when `|i - j| <= window / 2`, or i or j is one of the first `global_tokens` real tokens.

    `Window(window) | GlobalTokens(global_tokens)`: window counts the query's own key, and under causality the `window`
    latest are kept. The paper's dilated windows of some heads are left out. Cost O(n (window + global_tokens)).

    Source: Beltagy, Peters, Cohan, Longformer (arXiv 2004.05150), section 3.1.
    """

    window: int
    global_tokens: int

    causal = True

    def __post_init__(self) -> None:
        check_count("Longformer window", self.window)
        check_count("Longformer global_tokens", self.global_tokens)

    def select(self, inputs: Inputs) -> Graph:
        return Window(self.window).select(inputs) | GlobalTokens(self.global_tokens).select(inputs)

    def covers(self, inputs: Inputs) -> bool:
        return Window(self.window).covers(inputs) or GlobalTokens(self.global_tokens).covers(inputs)

    def work(self, inputs: Inputs) -> Work:
        return Work(float(self.window), banded=True) + GlobalTokens(self.global_tokens).work(inputs)
