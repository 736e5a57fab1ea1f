"""The one table of cases that every law runs over: plans, shapes, and how to make inputs for them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

import fewkeys as fk
from fewkeys.plan import Plan

KEEPS = {
    "window": fk.Window(9),
    "even window": fk.Window(6),
    "wide window": fk.Window(41),
    "sinks": fk.Sinks(3),
    "leverage": fk.Leverage(7),
    "leverage centred": fk.Leverage(7, centre=True),
    "universal set": fk.Leverage(eps=0.2),
    "universal set, power 4": fk.Leverage(eps=0.5, power=4),
    "l_1 leverage": fk.Leverage(7, power=1),
    "key norm": fk.KeyNorm(5),
    "random keys": fk.RandomKeys(6),
    "top-k": fk.TopK(5),
    "best columns": fk.BestColumns(5),
    "outliers": fk.Outliers(5, 8),
    "sinks + window": fk.Sinks(3) | fk.Window(6),
    "leverage + window": fk.Leverage(7) | fk.Window(11),
    "leverage + norm + sinks": fk.Leverage(4) | fk.KeyNorm(4) | fk.Sinks(2),
    "outliers + window": fk.Outliers(5, 8) | fk.Window(9),
    "top-k + window + sinks": fk.TopK(4) | fk.Window(5) | fk.Sinks(2),
    "recent blocks": fk.RecentBlocks(8),
    "recent blocks + window": fk.RecentBlocks(8) | fk.Window(21),
    "recent blocks + leverage + sinks": fk.RecentBlocks(16, 3) | fk.Leverage(7, centre=True) | fk.Sinks(2),
    "baseline longformer: window + globals": fk.Longformer(5, 2),
    "baseline bigbird: window + random + globals": fk.BigBird(4, 3, 2, 1),
    "baseline strided + window": fk.Strided(8),
    "baseline fixed windows": fk.Fixed(8, 2),
    "baseline reformer + window": fk.Reformer(8, 2) | fk.Window(1),
    "baseline sorted hash + window": fk.SortedLSH(9) | fk.Window(1),
    "baseline routing + window": fk.Routing(7) | fk.Window(1),
    "baseline low-dimensional entmax": fk.LowRankEntmax(4),
    "baseline random edges": fk.RandomEdges(6),
    "entmax support (oracle)": fk.EntmaxSupport(1.5),
}
RESTS = {
    "drop": fk.Drop(),
    "means": fk.ClusterMeans(8),
    "first-order means": fk.ClusterMeans(8, rank=3),
    "moments": fk.Moments(),
    "sample": fk.UniformSample(6),
}
WEIGHTS = {
    "softmax": fk.Softmax(),
    "entmax": fk.Entmax(1.5),
    "power": fk.Power(2.0),
    "elu": fk.Elu(),
    "relu": fk.Relu(2.0),
}


def _plans() -> dict[str, Plan]:
    """Every selector alone and (baselines not) under the richest rest; some under every rest and kernel there is.

    Combinations that are no plan at all are the business of test_refusals.py.
    """
    plans = {}
    for keep_name, keep in KEEPS.items():
        for rest_name, rest in RESTS.items():
            for weights_name, weights in WEIGHTS.items():
                usual = rest_name in ("drop", "first-order means") and weights_name == "softmax"
                if keep_name.startswith("baseline"):
                    usual = rest_name == "drop" and weights_name == "softmax"
                if not usual and keep_name not in ("leverage + window", "top-k + window + sinks"):
                    continue
                try:
                    plans[f"{keep_name}, {rest_name}, {weights_name}"] = Plan(keep, rest, weights)
                except ValueError:
                    continue
    return plans


PLANS = _plans()
"""All plans of the table."""

SOFTMAX_PLANS = {name: plan for name, plan in PLANS.items() if isinstance(plan.weights, fk.Softmax)}
RUNNING_PLANS = {
    "recent, running means": Plan(fk.RecentBlocks(8), fk.RunningMeans(6)),
    "recent + sinks + leverage, running means": Plan(
        fk.RecentBlocks(16) | fk.Sinks(2) | fk.Leverage(5, centre=True), fk.RunningMeans(7)
    ),
    "recent + random, running means": Plan(fk.RecentBlocks(64, 1) | fk.RandomKeys(70), fk.RunningMeans(3)),
    "recent, running means, power": Plan(fk.RecentBlocks(8, 3), fk.RunningMeans(6), fk.Power(2.0)),
}
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
        "leverage + window, moments, softmax",
        "leverage + window, sample, relu",
        "universal set, first-order means, softmax",
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
        g = torch.Generator().manual_seed(seed)
        query = torch.randn(self.batch, self.query_heads, self.queries, self.head_dim, generator=g, dtype=torch.float64)
        key = torch.randn(self.batch, self.kv_heads, self.keys, self.head_dim, generator=g, dtype=torch.float64)
        value = torch.randn(self.batch, self.kv_heads, self.keys, self.value_dim, generator=g, dtype=torch.float64)
        size = 0.3 + torch.rand(self.batch, self.kv_heads, self.keys, 1, generator=g, dtype=torch.float64) ** 4 * 3
        offset = torch.randn(self.batch, self.kv_heads, 1, self.head_dim, generator=g, dtype=torch.float64)
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
