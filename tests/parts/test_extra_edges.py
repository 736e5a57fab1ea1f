"""Edges of a kind that the package does not know: a stranger's graph brings its own scores and sums."""

from dataclasses import dataclass, replace

import pytest
import torch
from experiments.sparsefinder.baselines import Reformer

import fewkeys as fk
from fewkeys.core.validation import check_inputs
from fewkeys.core.work import Work
from fewkeys.execute.torch.sources import Kept

CALLS = []
"""Graphs whose edges the source below was made for."""


@dataclass(frozen=True)
class EveryThird:
    """(i, j) is an edge when `(i + lead) mod 3 = j mod 3`."""

    queries: int
    keys: int
    lead: int = 0

    def check(self, inputs):
        if inputs.keys != self.keys:
            raise ValueError(f"extra: expected {self.keys} keys, got {inputs.keys}")

    def mask(self, start, stop):
        query = torch.arange(start, stop)[:, None] - self.lead
        return ((query % 3 == torch.arange(self.keys) % 3) & (query >= 0))[None, None]

    def __or__(self, other):
        return self

    def delayed(self, count):
        return replace(self, lead=self.lead + count)

    def source(self, graph):
        CALLS.append(graph)
        return DenseSource(graph)


class DenseSource(Kept):
    """Every key for every query, hidden where it is no edge or where the band and the lists have it."""

    def __init__(self, graph):
        self.inputs, self.key, self.value = (
            graph.inputs,
            graph.inputs.key.flatten(0, 1),
            graph.inputs.value.flatten(0, 1),
        )
        near = replace(graph, extra=None).to_mask()
        self.mask = (graph.to_mask() & ~near).flatten(0, 1)

    @property
    def width(self):
        return self.inputs.keys

    def edges(self, chunk):
        mask = self.mask[chunk.heads, chunk.start : chunk.start + chunk.blocks * chunk.size]
        return torch.nn.functional.pad(mask, (0, 0, 0, chunk.blocks * chunk.size - mask.shape[1]))

    def scores(self, chunk):
        return (chunk.query @ self.key[chunk.heads].mT).masked_fill(~self.edges(chunk), -torch.inf)

    def mix(self, weights, chunk):
        return weights @ self.value[chunk.heads]

    def represented(self, member, chunk):
        return self.edges(chunk).to(member.dtype) @ member[chunk.heads]


@dataclass(frozen=True)
class Thirds(fk.select.Selector):
    causal = True

    def select(self, inputs):
        return fk.select.Graph(inputs, extra=EveryThird(inputs.queries, inputs.keys))

    def covers(self, inputs):
        return False

    def work(self, inputs):
        return Work(inputs.keys / 3)


BESIDE = [
    (None, fk.Drop()),
    (None, fk.ClusterMeans(3)),
    (fk.Window(3), fk.Drop()),
    (fk.Window(3) | fk.RandomKeys(4), fk.ClusterMeans(3)),
    (fk.select.RecentBlocks(8, 1), fk.Drop()),
]


@pytest.mark.parametrize(("beside", "rest"), BESIDE, ids=str)
def test_a_graph_brings_its_own_source(beside, rest):
    q, k, v = torch.randn(3, 2, 2, 30, 4, generator=torch.Generator().manual_seed(0)).unbind()
    options = {"keep": Thirds() if beside is None else Thirds() | beside, "rest": rest}
    if isinstance(beside, fk.select.RecentBlocks):
        q = q[:, :, 12:]  # so that the first query stands inside a block
        options |= {"is_causal": True, "query_offset": 12}
    CALLS.clear()
    slow = fk.attention(q, k, v, impl="reference", generator=torch.Generator().manual_seed(1), **options)
    assert not CALLS
    fast = fk.attention(q, k, v, impl="torch", generator=torch.Generator().manual_seed(1), **options)
    assert CALLS
    torch.testing.assert_close(fast, slow)


def test_extra_edges_that_do_not_fit_are_refused():
    q = torch.randn(1, 1, 9, 4)
    x = check_inputs(q, q, q)
    with pytest.raises(ValueError, match=r"^extra: expected 8 keys, got 9$"):
        fk.select.Graph(x, extra=EveryThird(9, 8))
    with pytest.raises(ValueError, match=r"^keep: expected extra edges of one kind, got EveryThird and Groups$"):
        fk.attention(q, q, q, keep=Thirds() | Reformer(2, 1))
