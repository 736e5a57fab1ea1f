"""The one table of cases that every law runs over: plans, shapes, and how to make inputs for them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product

import torch
from experiments.sparsefinder import baselines
from torch import Tensor

import fewkeys as fk
from fewkeys.papers import levattention, sparsefinder
from fewkeys.plan import Plan
from fewkeys.rest import Rest
from fewkeys.select import Selector


@dataclass(frozen=True)
class Case:
    """A selector, a rest or a plan of both, and the laws to which it is an exception.

    by_position: it looks at positions (law 5); draws: a number for every key, other ones for other lengths (laws 3, 5,
    6); grows: its lists or groups grow with the sequence (law 9); regroups: keys join groups by what they are, and the
    sizes of groups decide in which order is added (law 4); alone: tried without stand-ins only.
    """

    part: Selector | Rest | Plan
    by_position: bool = False
    draws: bool = False
    grows: bool = False
    regroups: bool = False
    alone: bool = False


def places(seed: int = 0) -> sparsefinder.Centroids:
    """Five centroids for heads of dimension 8."""
    return sparsefinder.Centroids(
        2 * torch.randn(1, 5, 8, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    )


def pairs() -> sparsefinder.Joined:
    """Such centroids of queries and of keys, of which every query cluster is joined to two of the keys'."""
    joined = torch.eye(5, dtype=torch.bool) | torch.eye(5, dtype=torch.bool).roll(1, 0)
    return sparsefinder.Joined(places(0).place, places(1).place, joined[None])


KEEP_CASES = {
    "window": Case(fk.Window(9), by_position=True),
    "even window": Case(fk.Window(6), by_position=True),
    "wide window": Case(fk.Window(41), by_position=True),
    "sinks": Case(fk.Sinks(3), by_position=True),
    "leverage": Case(fk.select.Leverage(7)),
    "leverage centred": Case(fk.select.Leverage(7, centre=True)),
    "universal set": Case(fk.select.Leverage(eps=0.2), grows=True),
    "universal set, power 4": Case(levattention.Sensitivity(eps=0.5, power=4), grows=True),
    "l_1 leverage": Case(levattention.Sensitivity(7, power=1)),
    "key norm": Case(fk.select.KeyNorm(5)),
    "random keys": Case(fk.RandomKeys(6), draws=True),
    "top-k": Case(fk.TopK(5)),
    "best columns": Case(fk.select.BestColumns(5)),
    "outliers": Case(fk.Outliers(5, 8)),
    "sinks + window": Case(fk.Sinks(3) | fk.Window(6), by_position=True),
    "leverage + window": Case(fk.select.Leverage(7) | fk.Window(11), by_position=True),
    "leverage + norm + sinks": Case(fk.select.Leverage(4) | fk.select.KeyNorm(4) | fk.Sinks(2), by_position=True),
    "outliers + window": Case(fk.Outliers(5, 8) | fk.Window(9), by_position=True),
    "top-k + window + sinks": Case(fk.TopK(4) | fk.Window(5) | fk.Sinks(2), by_position=True),
    "recent blocks": Case(fk.select.RecentBlocks(8), by_position=True),
    "recent blocks + window": Case(fk.select.RecentBlocks(8) | fk.Window(21), by_position=True),
    "recent blocks + leverage + sinks": Case(
        fk.select.RecentBlocks(16, 3) | fk.select.Leverage(7, centre=True) | fk.Sinks(2), by_position=True
    ),
    "global tokens + window": Case(sparsefinder.GlobalTokens(2) | fk.Window(3), by_position=True, alone=True),
    "longformer: window + globals": Case(baselines.Longformer(5, 2), by_position=True, alone=True),
    "bigbird: window + random + globals": Case(baselines.BigBird(4, 3, 2, 1), by_position=True, draws=True, alone=True),
    "strided + window": Case(baselines.Strided(8), by_position=True, grows=True, alone=True),
    "fixed windows": Case(baselines.Fixed(8, 2), by_position=True, grows=True, alone=True),
    "reformer + window": Case(
        baselines.Reformer(8, 2) | fk.Window(1), by_position=True, grows=True, regroups=True, alone=True
    ),
    "sorted hash + window": Case(baselines.SortedLSH(9) | fk.Window(1), by_position=True, alone=True),
    "routing + window": Case(baselines.Routing(7) | fk.Window(1), by_position=True, grows=True, alone=True),
    "block clusters": Case(sparsefinder.BlockClusters(4, 2, places()), by_position=True, alone=True),
    "predicted: buckets + window": Case(
        sparsefinder.Buckets(24, "uniform") | fk.Window(1),
        by_position=True,
        grows=True,
        regroups=True,
        alone=True,
    ),
    "predicted: clusters": Case(
        sparsefinder.Clusters(5, top=2, fitted=places()), grows=True, regroups=True, alone=True
    ),
    "predicted: pairs of clusters": Case(
        sparsefinder.ClusterPairs(5, 1.0, fitted=pairs()) | fk.Window(1),
        by_position=True,
        grows=True,
        regroups=True,
        alone=True,
    ),
    "predicted: distance": Case(sparsefinder.Distance(3.0) | fk.Window(1), by_position=True, alone=True),
    "low-dimensional entmax": Case(baselines.LowRankEntmax(4), alone=True),
    "random edges": Case(sparsefinder.RandomEdges(6), draws=True, alone=True),
    "key scan": Case(fk.KeyScan(9), by_position=True, grows=True, alone=True),
    "key scan + window": Case(fk.KeyScan(9) | fk.Window(25), by_position=True, grows=True, alone=True),
    "entmax support (oracle)": Case(sparsefinder.EntmaxSupport(1.5)),
}
REST_CASES = {
    "drop": Case(fk.Drop()),
    "means": Case(fk.ClusterMeans(8)),
    "first-order means": Case(fk.ClusterMeans(8, rank=3)),
    "sample": Case(fk.rest.UniformSample(6), draws=True),
}
KEEPS = {name: case.part for name, case in KEEP_CASES.items()}
RESTS = {name: case.part for name, case in REST_CASES.items()}
WEIGHTS = {
    "softmax": fk.Softmax(),
    "entmax": fk.weights.Entmax(1.5),
    "power": fk.weights.Power(2.0),
    "elu": fk.weights.Elu(),
    "softcap": fk.weights.Softcap(4.0),
    "relu": fk.weights.Relu(2.0),
}
SCANS = {
    "key scan, block means": Case(Plan(fk.KeyScan(9), fk.BlockMeans(3)), by_position=True, grows=True),
    "larger key scan, block means": Case(Plan(fk.KeyScan(40), fk.BlockMeans(2)), by_position=True, grows=True),
    "key scan, block means, power": Case(
        Plan(fk.KeyScan(7), fk.BlockMeans(1), fk.weights.Power(2.0)), by_position=True, grows=True
    ),
    "key scan, drop, entmax": Case(Plan(fk.KeyScan(40), weights=fk.weights.Entmax(1.5)), by_position=True, grows=True),
}
"""Plans whose queries scan the codes of all keys, and whose stand-ins are means of ranges."""

COHORTS = {
    "first-order cohorts": Case(Plan(fk.Outliers(5, 6, cohorts=4), fk.ClusterMeans(6, rank=3, cohorts=4))),
    "more cohorts than queries": Case(Plan(fk.Outliers(4, 5, cohorts=64), fk.ClusterMeans(5, cohorts=64))),
    "cohorts, drop, power": Case(Plan(fk.Outliers(9, 5, cohorts=8), weights=fk.weights.Power(2.0))),
    "first-order cohorts + window": Case(
        Plan(fk.Outliers(5, 6, cohorts=4) | fk.Window(7), fk.ClusterMeans(6, rank=3, cohorts=4)), by_position=True
    ),
    "cohorts + window, drop, power": Case(
        Plan(fk.Outliers(9, 5, cohorts=8) | fk.Window(4), weights=fk.weights.Power(2.0)), by_position=True
    ),
}
"""Plans with lists, and stand-ins, for cohorts of similar queries."""


def _plans() -> dict[str, Case]:
    """Every selector alone and (unless it is tried alone) under the richest rest; some under every rest and kernel.

    Combinations that are not plans are tested with the refusals.
    """
    plans = {}
    for keep_name, keep in KEEP_CASES.items():
        for (rest_name, rest), (weights_name, weights) in product(REST_CASES.items(), WEIGHTS.items()):
            rests = ("drop",) if keep.alone else ("drop", "first-order means")
            usual = weights_name == "softmax" and rest_name in rests
            if not usual and keep_name not in ("leverage + window", "top-k + window + sinks"):
                continue
            try:
                plan = Plan(keep.part, rest.part, weights)
            except ValueError:
                continue
            name = f"{keep_name}, {rest_name}, {weights_name}"
            plans[name] = replace(keep, part=plan, draws=keep.draws or rest.draws)
    return plans | SCANS | COHORTS


RUNNING_CASES = {
    "recent, running means": Case(Plan(fk.select.RecentBlocks(8), fk.rest.RunningMeans(6))),
    "recent + sinks, running means": Case(Plan(fk.select.RecentBlocks(16) | fk.Sinks(2), fk.rest.RunningMeans(7))),
    "recent, running means, power": Case(
        Plan(fk.select.RecentBlocks(8, 3), fk.rest.RunningMeans(6), fk.weights.Power(2.0))
    ),
}
CASES = _plans() | RUNNING_CASES
"""The whole table, by name: `PLANS` and those below are its plans."""
PLANS = {name: case.part for name, case in _plans().items()}
"""All plans that do not need causality."""

SOFTMAX_PLANS = {name: plan for name, plan in PLANS.items() if isinstance(plan.weights, fk.Softmax)}
RUNNING_PLANS = {name: case.part for name, case in RUNNING_CASES.items()}
"""Plans with stand-ins of the past, which exist under causality only."""
CAUSAL_PLANS = {name: plan for name, plan in PLANS.items() if plan.rest.causal and plan.keep.causal} | RUNNING_PLANS
SOME_PLANS = {
    name: PLANS[name]
    for name in (
        "window, drop, softmax",
        "leverage + window, drop, entmax",
        "outliers + window, first-order means, softmax",
        "top-k + window + sinks, means, elu",
        "leverage + window, means, power",
        "leverage + window, sample, relu",
        "universal set, first-order means, softmax",
        "key scan, block means",
        "first-order cohorts + window",
    )
}
"""One plan of every kind, for laws that are slow to check."""


@dataclass(frozen=True)
class Shape:
    """Sizes of one problem."""

    batch: int = 2
    query_heads: int = 2
    kv_heads: int = 2
    queries: int = 70
    keys: int = 70
    head_dim: int = 8
    value_dim: int = 8
    lengths: tuple[int, ...] | None = None
    is_causal: bool = False
    query_offset: int = 0

    def draw(self, seed: int = 0, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
        """Query, key and value with a common offset of the keys and some large ones, as real heads have them."""
        options = {"generator": torch.Generator().manual_seed(seed), "dtype": torch.float64}
        query = torch.randn(self.batch, self.query_heads, self.queries, self.head_dim, **options)
        key = torch.randn(self.batch, self.kv_heads, self.keys, self.head_dim, **options)
        value = torch.randn(self.batch, self.kv_heads, self.keys, self.value_dim, **options)
        size = 0.3 + torch.rand(self.batch, self.kv_heads, self.keys, 1, **options) ** 4 * 3
        offset = torch.randn(self.batch, self.kv_heads, 1, self.head_dim, **options)
        return query.to(dtype), (key * size + offset).to(dtype), value.to(dtype)

    @property
    def options(self) -> dict[str, object]:
        """The keyword arguments that belong to the shape."""
        lengths = None if self.lengths is None else torch.tensor(self.lengths)
        return {"lengths": lengths, "is_causal": self.is_causal, "query_offset": self.query_offset}


SHAPES = {
    "plain": Shape(),
    "grouped": Shape(query_heads=6, kv_heads=2, value_dim=5),
    "padded": Shape(lengths=(70, 33)),
    "cross": Shape(queries=37, keys=90, value_dim=12),
    "cross padded": Shape(queries=37, keys=90, lengths=(90, 11)),
    "one query": Shape(queries=1, keys=65, query_offset=64),
    "few keys": Shape(queries=20, keys=4),
    "long": Shape(batch=1, query_heads=1, kv_heads=1, queries=401, keys=401),
}
CAUSAL_SHAPES = {
    "causal": Shape(queries=150, keys=150, is_causal=True),
    "causal grouped": Shape(queries=150, keys=150, query_heads=4, is_causal=True),
    "causal padded": Shape(queries=150, keys=150, lengths=(150, 71), is_causal=True),
    "causal with offset": Shape(queries=30, keys=150, query_offset=120, is_causal=True),
    "causal decode": Shape(queries=1, keys=150, query_offset=149, is_causal=True),
    "causal upper-left": Shape(queries=30, keys=150, is_causal=True),
}
