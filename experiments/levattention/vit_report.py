"""The table and the figure of a data set, made from the files of its finished runs."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from vit_plans import PLANS

from fewkeys.core.files import write_json


@dataclass(frozen=True)
class Look:
    """How a row is drawn."""

    color: str
    dash: Any = "-"
    marker: str = "o"
    width: float = 1.7


# Colours of Okabe and Ito, which colour-blind readers tell apart. Black: the oracle. Grey: controls.
LOOKS = {
    "top-k oracle": Look("#000000", (0, (5, 2)), "D"),
    "fewkeys budget": Look("#009e73", width=3.0),
    "leverage": Look("#e69f00", marker="^", width=2.4),
    "leverage, centred": Look("#d55e00", marker="^"),
    "leverage + window": Look("#cc79a7", marker="v"),
    "window": Look("#56b4e9", marker="s"),
    "key norm": Look("#767676", marker="P"),
    "random": Look("#767676", (0, (1, 1.5)), "x"),
}


def report(out: Path, data: str, paths: Sequence[Path]) -> str:
    """Write OUT/vit-DATA.json and OUT/vit-DATA.png; returns the table as text."""
    runs = [json.loads(path.read_text(encoding="utf-8")) for path in paths]
    table = summary(data, runs)
    write_json(out, f"vit-{data}.json", table)
    draft = out / f".vit-{data}.png"
    _figure(table, draft)
    draft.replace(out / f"vit-{data}.png")
    return text(table)


def summary(data: str, runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Means over the seeds of every row."""
    full = [run for run in runs if run["selector"] == "softmax"]
    rows = [row for run in full for row in run["inference"]]
    order = list(PLANS)
    asked = sorted({(row["k"], row["selector"]) for row in rows}, key=lambda pair: (order.index(pair[1]), pair[0]))
    trained = sorted(
        {(run["selector"], run["k"], run["warm"]) for run in runs if run["k"] is not None},
        key=lambda key: (order.index(key[0]), key[2], key[1]),
    )
    softmax = _spread(run["accuracy"] for run in full)
    return {
        "data": data,
        "settings": runs[0]["settings"],
        "softmax": softmax,
        "inference": [
            {"selector": name, "k": k, **_inference([r for r in rows if (r["k"], r["selector"]) == (k, name)], softmax)}
            for k, name in asked
        ],
        "trained": [
            {
                "selector": name,
                "k": k,
                "warm": warm,
                **(
                    found := _spread(
                        r["accuracy"] for r in runs if (r["selector"], r["k"], r["warm"]) == (name, k, warm)
                    )
                ),
                "of_softmax": found["mean"] / softmax["mean"],
            }
            for name, k, warm in trained
        ],
        "cpu_seconds": sum(run.get("cpu_seconds", 0.0) for run in runs),
        "machine": runs[0]["machine"],
        "versions": runs[0]["versions"],
    }


def _inference(rows: Sequence[dict[str, Any]], softmax: dict[str, Any]) -> dict[str, Any]:
    found = _accuracy(rows, softmax)
    for name in ("mass", "class_token_mass"):
        layers = [mean(layer) for layer in zip(*(row[name] for row in rows), strict=True)]
        found |= {name: mean(layers), f"{name}_by_layer": layers}
    return found


def _accuracy(rows: Sequence[dict[str, Any]], softmax: dict[str, Any]) -> dict[str, Any]:
    found = _spread(row["accuracy"] for row in rows)
    return {**found, "of_softmax": found["mean"] / softmax["mean"] if softmax["mean"] else None}


def _spread(values: Iterable[float]) -> dict[str, Any]:
    found = list(values)
    return {"mean": mean(found), "deviation": stdev(found) if len(found) > 1 else None, "seeds": len(found)}


def text(table: dict[str, Any]) -> str:
    lines = [f"{table['data']}: full softmax {_percent(table['softmax'])} ({table['softmax']['seeds']} seeds)", ""]
    lines += ["selection at inference only: accuracy % (deviation), captured softmax mass", ""]
    lines += _grid(table["inference"], lambda row: f"{_percent(row)}  {row['mass']:.2f}", lambda row: row["selector"])
    if table["trained"]:
        lines += ["", "trained and tested with the selection: accuracy % (deviation, seeds)", ""]
        lines += _grid(table["trained"], lambda row: f"{_percent(row)} x{row['seeds']}", _trained_name)
    return "\n".join(lines)


def _grid(rows: Sequence[dict[str, Any]], show: Any, name: Any) -> list[str]:
    counts = sorted({row["k"] for row in rows})
    names = list(dict.fromkeys(name(row) for row in rows))
    cells = {(name(row), row["k"]): show(row) for row in rows}
    head = f"{'':26}" + "".join(f"{f'k = {k}':>20}" for k in counts)
    return [head, *(f"{own:26}" + "".join(f"{cells.get((own, k), '-'):>20}" for k in counts) for own in names)]


def _trained_name(row: dict[str, Any]) -> str:
    return f"{row['selector']}, warm start" if row["warm"] else row["selector"]


def _percent(row: dict[str, Any]) -> str:
    spread = "" if row["deviation"] is None else f" ({100 * row['deviation']:.1f})"
    return f"{100 * row['mean']:.1f}{spread}"


def _figure(table: dict[str, Any], path: Path) -> None:
    """Accuracy at inference only, captured mass, and accuracy when trained: each against k."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    panels = 3 if table["trained"] else 2
    figure = Figure(figsize=(4.6 * panels, 5.0), dpi=150, facecolor="white")
    FigureCanvasAgg(figure)
    axes = figure.subplots(1, panels)
    full = 100 * table["softmax"]["mean"]
    titles = ["Selection at inference only", "Softmax mass on the kept keys", "Trained and tested with selection"]
    rows = [table["inference"], table["inference"], [row for row in table["trained"] if not row["warm"]]]
    for place, (panel, title) in enumerate(zip(axes, titles, strict=False)):
        panel.set_title(title, fontsize=11, loc="left", weight="bold")
        panel.set_ylabel("share of the mass, %" if place == 1 else "accuracy, %")
        for name, look in LOOKS.items():
            own = [row for row in rows[place] if row["selector"] == name]
            values = [100 * row["mass" if place == 1 else "mean"] for row in own]
            spread = [0.0 if place == 1 else 100 * (row["deviation"] or 0.0) for row in own]
            if own:
                panel.errorbar(
                    [row["k"] for row in own], values, yerr=spread, label=name, color=look.color, linestyle=look.dash,
                    linewidth=look.width, marker=look.marker, markersize=6, capsize=2, elinewidth=0.8,
                )  # fmt: skip
        for row in table["trained"] if place == 2 else []:
            if row["warm"]:
                panel.plot(
                    row["k"], 100 * row["mean"], "*", color="#0072b2", markersize=12, label="leverage, warm start"
                )
        if place != 1:
            panel.axhline(full, color="#333333", linewidth=1.0)
            panel.annotate(f"full softmax {full:.1f}", (0.02, full), xycoords=("axes fraction", "data"), fontsize=8.5,
                           xytext=(0, 3), textcoords="offset points")  # fmt: skip
        _scale(panel, sorted({row["k"] for row in rows[place]}), place)
    if panels == 3:
        low = min(100 * row["mean"] for row in table["trained"])
        axes[2].set_ylim(max(0.0, low - 4), full + (full - low + 4) * 0.12)
    handles = {
        label: handle for panel in axes for handle, label in zip(*panel.get_legend_handles_labels(), strict=True)
    }
    figure.legend(handles.values(), handles.keys(), loc="lower center", ncols=5, fontsize=9, frameon=False)
    figure.suptitle(_title(table), fontsize=10, color="#555555", x=0.01, ha="left")
    figure.tight_layout(rect=(0, 0.1, 1, 0.99))
    figure.savefig(path, format="png", metadata={"Software": None})


def _scale(panel: Any, counts: Sequence[int], place: int) -> None:
    panel.set_xscale("log", base=2)
    panel.set_xticks(counts, [str(k) for k in counts])
    panel.set_xticks([], minor=True)
    panel.set_xlabel("keys kept by a query, k")
    panel.grid(axis="y", color="#e4e4e4", linewidth=0.8)
    panel.set_axisbelow(True)
    if place < 2:
        panel.set_ylim(0, 104)
    for side in ("top", "right"):
        panel.spines[side].set_visible(False)


def _title(table: dict[str, Any]) -> str:
    model, recipe = table["settings"]["model"], table["settings"]["recipe"]
    if not model:
        return f"{table['data']}, {table['settings']['checkpoint']}"
    tokens = (model["image_size"] // model["patch_size"]) ** 2 + 1
    return (
        f"{table['data']}: ViT of {model['num_hidden_layers']} layers, {model['num_attention_heads']} heads, width "
        f"{model['hidden_size']}, {tokens} tokens, {recipe['epochs']} epochs; mean and deviation over seeds"
    )
