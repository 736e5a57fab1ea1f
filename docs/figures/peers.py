"""Figures of experiments/peers: rivals side by side."""

from collections.abc import Callable
from functools import partial
from typing import Any

from docs.figures.sources import read, table

RESULTS = "experiments/peers/results"
ENCODERS = ("minilm", "minilm-16384", "t2t-3136", "t2t-784", "biggan", "normal-1024")
REACHED = (0.5, 0.3, 0.2, 0.1)


def _data(name: str) -> dict[str, Any]:
    found: dict[str, Any] = read(f"{RESULTS}/{name}.json")
    return found


def _shown(ms: float) -> str:
    return f"{ms:.3g}" if ms < 100 else f"{ms:,.0f}"


def _encoder(name: str) -> str:
    """The least milliseconds in which each row reaches an error, and its least error among the settings timed."""
    from experiments.peers.fronts import fronts

    data = _data(name)
    rows = []
    for peer, own in fronts(data["rows"]).items():
        times = [min((row["ms"] for row in own if row["error"] <= level), default=None) for level in REACHED]
        shown = ["" if ms is None else _shown(ms) for ms in times]
        best = own[-1]
        cells = [peer, *shown, f"{best['error']:.3f} in {_shown(best['ms'])}"]
        rows.append([f"**{cell}**" if cell and peer == "fewkeys" else cell for cell in cells])
    return table(
        [f"ms; exact {_shown(data['exact_ms'])}", *(f"error {level}" for level in REACHED), "least error"], rows
    )


def _below(name: str) -> str:
    """Who lies anywhere below us, and where its least time and least error there are."""
    from experiments.peers.fronts import rivals_below

    data = _data(name)
    found = rivals_below(data["rows"], data["exact_ms"])
    return ", ".join(f"{peer} ({points[0]['error']:.2f} in {points[0]['ms']:.2g} ms)" for peer, points in found.items())


def _kernels() -> str:
    """How many times as fast as torch's steps the kernels are, over all settings that were timed both ways."""
    found = []
    for name in ("minilm", "minilm-16384"):
        ms: dict[str, dict[str, float]] = {}
        for row in _data(name)["rows"]:
            if row["peer"].startswith("fewkeys") and row["ms"] is not None:
                ms.setdefault(str(row["settings"]), {})[row["peer"]] = row["ms"]
        found += [both["fewkeys, torch alone"] / both["fewkeys"] for both in ms.values() if len(both) == 2]
    return f"{min(found):.1f} to {max(found):.1f}"


def _decoder() -> str:
    found: dict[str, dict[int, dict[str, Any]]] = {}
    for row in _data("smollm2")["rows"]:
        found.setdefault(row["peer"], {})[row["slots"]] = row
    rows = []
    for peer, own in found.items():
        cells = [
            f"{own[slots]['error']:.3f} ({own[slots]['paid']:.0f})" if slots in own else "" for slots in (64, 128, 256)
        ]
        rows.append([peer, *cells])
    return table(["error (slots paid)", "64 slots", "128 slots", "256 slots"], rows)


FIGURES: dict[str, Callable[[], str]] = {
    **{f"peers.{name}": partial(_encoder, name) for name in ENCODERS},
    **{f"peers.below.{name}": partial(_below, name) for name in ENCODERS},
    "peers.decoder": _decoder,
    "peers.kernels": _kernels,
}
