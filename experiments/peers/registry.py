"""The methods that are compared on encoders: the function and the settings of each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from experiments.peers import (
    hyperattention,
    kdeformer,
    lists,
    multipole,
    nystromformer,
    oracle,
    ours,
    performer,
    prescoring,
    reformer,
    thinformer,
    wildcat,
)
from experiments.peers.parts import Attend


@dataclass(frozen=True)
class Peer:
    """One row: `grid(queries, keys, dim)` gives the settings to search. Oracles are not timed."""

    attend: Attend
    grid: Callable[[int, int, int], list[dict[str, Any]]]
    kind: Literal["ours", "rival", "control", "oracle"] = "rival"


OURS, PLAIN, ORACLE = "fewkeys", "fewkeys, torch alone", "best keys per query (oracle)"
PEERS: dict[str, Peer] = {
    OURS: Peer(ours.attend, ours.grid, "ours"),
    PLAIN: Peer(ours.plain, ours.grid, "ours"),
    "WildCat": Peer(wildcat.attend, wildcat.grid),
    "Thinformer": Peer(thinformer.attend, thinformer.grid),
    "KDEformer": Peer(kdeformer.attend, kdeformer.grid),
    "HyperAttention": Peer(hyperattention.attend, hyperattention.grid),
    "Performer": Peer(performer.attend, performer.grid),
    "Reformer": Peer(reformer.attend, reformer.grid),
    "Nystromformer": Peer(nystromformer.attend, nystromformer.grid),
    "Multipole": Peer(multipole.attend, multipole.grid),
    "Pre-Scoring": Peer(prescoring.attend, prescoring.grid),
    "LevAttention": Peer(lists.leverage, lists.leverage_grid),
    "random keys": Peer(lists.chance, lists.grid, "control"),
    "key norm": Peer(lists.norm, lists.grid, "control"),
    ORACLE: Peer(oracle.attend, lists.grid, "oracle"),
}
