"""Every method of the comparison as a family of selectors: one for each value that the sweep goes through."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from experiments.sparsefinder.baselines import (
    BigBird,
    Fixed,
    Longformer,
    LowRankEntmax,
    Reformer,
    Routing,
    SortedLSH,
    Strided,
)

import fewkeys as fk
from fewkeys.papers import sparsefinder
from fewkeys.papers.sparsefinder import BlockClusters, RandomEdges
from fewkeys.select import Selector

WINDOWS = (0, 1, 3, 5, 7, 9, 11, 15, 19, 23, 27)
COUNTS = (2, 4, 6, 8, 10, 12, 14, 16, 18, 20)
DISTANCES = tuple(0.5 * step for step in range(1, 11))
LIFTS = (2.0, 1.5, 1.2, 1.0, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2)
BLOCK = 8

Kind = Literal["learned", "not learned", "scores every pair", "control"]


@dataclass(frozen=True)
class Family:
    """`values` by label; `make(layer, value)` is the selector of one layer, to which every window is added.

    kind: "learned": Sparsefinder's groupings and others in its space or with centroids learned offline. "not learned":
    patterns, hashes and what needs no training. "scores every pair": cheaper scores, but n^2 of them, so no method that
    could save time. "control": looks at nothing, or at the norm of the keys.
    """

    kind: Kind
    values: tuple[object, ...]
    make: Callable[[int, object], Selector | None]


def families(
    finder: sparsefinder.Sparsefinder, raw: sparsefinder.Sparsefinder, *, blocks: bool = False, scale: float = 1.0
) -> Mapping[str, Family]:
    """All families for the model that `finder` (its learned space) and `raw` (q and k as they are) were fitted on.

    blocks: also the block versions, for sequences long enough. scale: of the distance thresholds, where the margin of
    the fit was not 1.
    """
    shape = finder.shape
    found: dict[str, Family] = {"window": Family("not learned", (0,), lambda layer, _: None)}
    for space, own in (("", finder), (", raw", raw)):
        for name, grouping, values in (
            ("distance", lambda t, own=own: sparsefinder.Distance(t * (scale if own is finder else 1.0)), DISTANCES),
            ("buckets", sparsefinder.Buckets, COUNTS),
            ("uniform buckets", lambda count: sparsefinder.Buckets(count, "uniform"), COUNTS),
            ("clusters", sparsefinder.Clusters, COUNTS),
            ("clusters, top 2", lambda count: sparsefinder.Clusters(count, top=2), COUNTS[1:]),
            ("clusters, 2 rounds", lambda count: sparsefinder.Clusters(count, rounds=2), COUNTS),
            (
                "cluster pairs",
                lambda value: sparsefinder.ClusterPairs(*value),
                tuple((count, lift) for count in (8, 20) for lift in LIFTS),
            ),
        ):
            kind: Kind = "scores every pair" if name == "distance" else "learned"
            found[name + space] = Family(
                kind, values, lambda layer, value, own=own, grouping=grouping: own.selector(layer, grouping(value))
            )
        found["Reformer" + (", projected" if own is finder else "")] = Family(
            "learned" if own is finder else "not learned",
            COUNTS,
            lambda layer, count, own=own: Reformer(count, project=own.projection(layer)),
        )
        found["Routing" + (", projected" if own is finder else "")] = Family(
            "learned",
            COUNTS,
            lambda layer, count, own=own: Routing(
                count, shape.kind == "bidirectional", own.centroids(layer, count), own.projection(layer)
            ),
        )
        if blocks:
            for version, inside in (("v1", False), ("v2", True)):
                found[f"block clusters {version}{space}"] = Family(
                    "learned",
                    tuple((count, top) for count in (4, 8) for top in (1, 2, 4)),
                    lambda layer, value, own=own, inside=inside: BlockClusters(
                        BLOCK, value[1], own.centroids(layer, value[0]), own.projection(layer), inside
                    ),
                )
    found["low-dimensional entmax"] = Family(
        "scores every pair", (4,), lambda layer, _: LowRankEntmax(project=finder.projection(layer))
    )
    found["low-dimensional entmax, random"] = Family(
        "scores every pair", (2, 4, 8, 16), lambda layer, rank: LowRankEntmax(rank)
    )
    found |= {
        "Longformer": Family("not learned", COUNTS, lambda layer, count: Longformer(1, count)),
        "BigBird": Family("not learned", COUNTS, lambda layer, count: BigBird(1, 1, count, 2)),
        "strided": Family("not learned", COUNTS, lambda layer, count: Strided(count)),
        "fixed": Family("not learned", COUNTS, lambda layer, count: Fixed(count)),
        "random edges": Family("control", COUNTS, lambda layer, count: RandomEdges(count)),
        "key norm": Family("control", COUNTS, lambda layer, count: fk.select.KeyNorm(count)),
    }
    if shape.kind != "causal":
        found["sorted LSH"] = Family("not learned", COUNTS, lambda layer, count: SortedLSH(count))
    if blocks:
        found["BigBird, blocks"] = Family("not learned", (1, 2, 4, 6), lambda layer, count: BigBird(BLOCK, 3, count, 1))
    return found
