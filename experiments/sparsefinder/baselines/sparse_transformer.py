"""Patterns of fixed stride."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fewkeys.core.graph import Columns, Graph
from fewkeys.core.inputs import Inputs
from fewkeys.core.validation import check_count
from fewkeys.core.work import Work
from fewkeys.papers.sparsefinder.groups import Groups
from fewkeys.select.base import Selector


@dataclass(frozen=True)
class Strided(Selector, listed=True):
    """(i, j) is an edge when `|i - j| <= stride` or `(i - j) mod stride = 0`, i and j positions.

    Both of the paper's two patterns at once, its merged head. The paper is causal, so j <= i there; without causality
    the pattern is symmetric. Cost O(n (stride + n / stride)), least at the paper's choice `stride = sqrt(n)`.

    Source: Child, Gray, Radford, Sutskever, Sparse Transformers (arXiv 1904.10509), section 4.3.
    """

    stride: int

    causal = True

    def __post_init__(self) -> None:
        check_count("Strided stride", self.stride)

    def select(self, inputs: Inputs) -> Graph:
        x = inputs
        query, key = (position % self.stride for position in _positions(x))
        after = 0 if x.is_causal else self.stride
        return Graph(x, band=(self.stride, after), extra=_groups(x, query, key, self.stride))

    def covers(self, inputs: Inputs) -> bool:
        return self.stride == 1 or self.stride >= max(inputs.keys, inputs.queries + inputs.offset) - 1

    def work(self, inputs: Inputs) -> Work:
        return Work(inputs.keys / self.stride + (1 if inputs.is_causal else 2) * self.stride, banded=True)


@dataclass(frozen=True)
class Fixed(Selector, listed=True):
    """(i, j) is an edge when `i // stride = j // stride` or `j mod stride >= stride - summary`, i and j positions.

    Every block of `stride` positions sees itself, and the last `summary` positions of every block, which summarise it.
    The paper is causal and takes stride 128 or 256 and summary 8, 16 or 32.
    Cost O(n (stride + n summary / stride)).

    Source: Child, Gray, Radford, Sutskever, Sparse Transformers (arXiv 1904.10509), section 4.3.
    """

    stride: int
    summary: int = 1

    causal = True

    def __post_init__(self) -> None:
        check_count("Fixed stride", self.stride)
        if check_count("Fixed summary", self.summary) > self.stride:
            raise ValueError(f"Fixed summary: expected at most the stride, {self.stride}, got {self.summary}; lower it")

    def select(self, inputs: Inputs) -> Graph:
        x = inputs
        query, key = (position // self.stride for position in _positions(x))
        count = max(x.keys, x.queries + x.offset)
        graph = Graph(x, extra=_groups(x, query, key, -(-count // self.stride)))
        place = torch.arange(x.keys, device=x.key.device)
        index = place[place % self.stride >= self.stride - self.summary].expand(x.batch, x.kv_heads, -1)
        if not index.shape[-1]:
            return graph
        used = torch.ones_like(index, dtype=torch.bool)
        if x.valid is not None:
            used = x.valid[:, None].expand(-1, x.kv_heads, -1).gather(-1, index)
        return graph | Graph(x, columns=Columns.shared(index, used, x.queries))

    def covers(self, inputs: Inputs) -> bool:
        reach = max(inputs.keys, inputs.queries + inputs.offset)
        return self.summary == self.stride or self.stride >= reach

    def work(self, inputs: Inputs) -> Work:
        return Work(min(self.stride, inputs.keys) + inputs.keys * self.summary / self.stride)


def _positions(x: Inputs) -> tuple[Tensor, Tensor]:
    device = x.key.device
    return torch.arange(x.queries, device=device) + x.offset, torch.arange(x.keys, device=device)


def _groups(x: Inputs, query: Tensor, key: Tensor, count: int) -> Groups:
    """The same ids (Nq,) and (Nk,) for all sequences and heads."""
    query, key = (ids[:, None].expand(x.batch, x.query_heads, -1, -1) for ids in (query, key))
    return Groups(query, key, count)
