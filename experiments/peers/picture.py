"""One picture for a setting: error against milliseconds, each row at its best settings."""

from __future__ import annotations

import os
from typing import Any

from experiments.peers.fronts import fronts
from experiments.peers.registry import ORACLE, OURS, PEERS, PLAIN

from fewkeys.report.style import Look, draw, label, logarithmic, name_lines, save, say, sheet, upright

LOOKS = {
    OURS: Look("#009e73", "-", 3.4, "o"),
    PLAIN: Look("#009e73", (0, (4, 2)), 1.8, "o"),
    "random keys": Look("#767676", "-", 1.3, "x"),
    "key norm": Look("#a3a3a3", "-", 1.3, "+"),
    "WildCat": Look("#0072b2", "-", 1.9, "s"),
    "Thinformer": Look("#56b4e9", "-", 1.6, "s"),
    "KDEformer": Look("#e69f00", "-", 1.6, "^"),
    "HyperAttention": Look("#d55e00", "-", 1.6, "^"),
    "Performer": Look("#cc79a7", "-", 1.6, "v"),
    "Reformer": Look("#8a7400", "-", 1.6, "h"),
    "Nystromformer": Look("#6a3d9a", "-", 1.6, "d"),
    "Multipole": Look("#b15928", "-", 1.9, "D"),
    "Pre-Scoring": Look("#c51b7d", "-", 1.6, "P"),
    "LevAttention": Look("#4d4d4d", "-", 1.6, "p"),
}
LEAST = 1e-3
DECODERS = {
    "fewkeys": LOOKS[OURS],
    "fewkeys, constant memory": LOOKS[PLAIN],
    "oracle": Look("#000000", (0, (5, 2)), 1.8, "D"),
    "key norm": LOOKS["key norm"],
    "random keys": LOOKS["random keys"],
    "sinks + window": Look("#767676", (0, (1, 1.6)), 1.3, "s"),
    "Quest": Look("#56b4e9", "-", 1.6, "s"),
    "Quest, scoring free": Look("#56b4e9", (0, (4, 2)), 1.4, "s"),
    "Multipole": LOOKS["Multipole"],
    "Multipole, scoring free": Look("#b15928", (0, (4, 2)), 1.4, "D"),
    "RetroInfer": Look("#0072b2", "-", 1.6, "^"),
    "RetroInfer, scoring free": Look("#0072b2", (0, (4, 2)), 1.4, "^"),
    "vAttention": Look("#d55e00", "-", 1.6, "v"),
    "SnapKV": Look("#e69f00", "-", 1.6, "h"),
    "Expected Attention": Look("#cc79a7", "-", 1.6, "h"),
    "Compactor": Look("#c51b7d", "-", 1.6, "P"),
    "KeyDiff": Look("#8a7400", "-", 1.6, "p"),
    "accumulated attention": Look("#6a3d9a", "-", 1.6, "p"),
    "Express": Look("#4d4d4d", "-", 1.6, "d"),
}


def save_picture(data: dict[str, Any], path: str | os.PathLike[str]) -> None:
    """Draw a setting's results as PNG. Errors of 1 and more, no better than the answer 0, are left out."""
    lines = {
        name: [row for row in front if LEAST < row["error"] < 1.0]
        for name, front in fronts(data["rows"]).items()
        if PEERS[name].kind != "oracle"
    }
    lines = {name: line for name, line in lines.items() if line}
    oracle = {row["settings"]["kept"]: row["error"] for row in data["rows"] if row["peer"] == ORACLE}
    oracle = {kept: oracle[kept] for kept in (64, 256) if oracle.get(kept, 0.0) > LEAST}
    machine = data["machine"]
    threads = "1 thread" if machine["threads"] == 1 else f"{machine['threads']} threads"
    subtitle = f"{data['title']}; {machine['cpu']}, {threads}; dotted: the oracle's best keys"
    figure, (axes,) = sheet(f"Error against time: {data['setting']}", subtitle, names=2.2)
    exact = data["exact_ms"]
    for name, line in lines.items():
        draw(axes, [row["ms"] for row in line], [row["error"] for row in line], LOOKS[name])
    upright(axes, exact, "exact attention: error 0", "#000000", strong=True)
    say(axes, "ms", "mean relative output error")
    logarithmic(axes, "x", [exact, *(row["ms"] for line in lines.values() for row in line)])
    logarithmic(axes, "y", [*(row["error"] for line in lines.values() for row in line), *oracle.values()])
    for kept, error in oracle.items():
        axes.axhline(error, color="#000000", linewidth=0.9, linestyle=(0, (1, 1.6)), zorder=1)
        label(axes, f"{kept}", (0.005, error), (0, 0), xycoords=("axes fraction", "data"), fontsize=8, va="bottom")
    name_lines(axes, {name: (line[-1]["ms"], line[-1]["error"]) for name, line in lines.items()}, LOOKS)
    save(figure, path)


def save_slots(data: dict[str, Any], path: str | os.PathLike[str]) -> None:
    """Draw a decoder's results, error against the slots that queries really paid, as PNG."""
    lines: dict[str, list[dict[str, Any]]] = {}
    for row in sorted(data["rows"], key=lambda row: row["paid"]):
        lines.setdefault(row["peer"], []).append(row)
    subtitle = f"SmolLM2-135M, {data['length']:,} tokens, second half; paid: keys kept, drawn or standing, means scored"
    figure, (axes,) = sheet("Error against slots on a decoder", subtitle, names=2.2)
    for name, line in lines.items():
        draw(axes, [row["paid"] for row in line], [row["error"] for row in line], DECODERS[name])
    say(axes, "slots a query pays", "mean relative output error")
    logarithmic(axes, "x", [row["paid"] for row in data["rows"]])
    logarithmic(axes, "y", [row["error"] for row in data["rows"]])
    name_lines(axes, {name: (line[-1]["paid"], line[-1]["error"]) for name, line in lines.items()}, DECODERS)
    save(figure, path)
