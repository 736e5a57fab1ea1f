"""The table and the figure of a data set, made from the files of its finished runs."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import mean, stdev
from typing import TYPE_CHECKING, Any

from vit_plans import PLANS

from fewkeys.core.files import write_json
from fewkeys.report.style import Look, draw, label, logarithmic, name_lines, save, say, sheet

if TYPE_CHECKING:
    from matplotlib.axes import Axes


# Colours of Okabe and Ito, which colour-blind readers tell apart. Black: the oracle. Grey: controls.
LOOKS = {
    "top-k oracle": Look("#000000", (0, (5, 2)), 1.8, "D"),
    "fewkeys budget": Look("#009e73", width=3.4),
    "leverage": Look("#e69f00", marker="^"),
    "leverage, centred": Look("#d55e00", marker="^"),
    "leverage + window": Look("#cc79a7", marker="v"),
    "window": Look("#56b4e9", marker="s"),
    "key norm": Look("#a3a3a3", width=1.3, marker="+"),
    "random": Look("#767676", width=1.3, marker="x"),
    "leverage, warm start": Look("#0072b2", marker="*"),
}


def report(out: Path, data: str, paths: Sequence[Path]) -> str:
    """Write OUT/vit-DATA.json and OUT/vit-DATA.png; returns the table as text."""
    runs = [json.loads(path.read_text(encoding="utf-8")) for path in paths]
    table = summary(data, runs)
    write_json(out, f"vit-{data}.json", table)
    figure(table, out / f"vit-{data}.png")
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


def figure(table: dict[str, Any], path: Path) -> None:
    """Accuracy at inference only, captured mass, and accuracy when trained: each against k."""
    page, panels = sheet(
        f"Vision transformers with few keys: {table['data']}", _title(table), columns=3 if table["trained"] else 2,
        size=(3.7, 3.1), names=1.75,
    )  # fmt: skip
    full = 100 * table["softmax"]["mean"]
    for axes in panels[:2]:
        axes.set_ylim(0, 104)
    say(panels[0], "keys kept by a query", "accuracy, %", "Selection at inference only")
    _lines(panels[0], table["inference"], "mean")
    say(panels[1], "keys kept by a query", "share of the mass, %", "Softmax mass on the kept keys")
    _lines(panels[1], table["inference"], "mass")
    if table["trained"]:
        say(panels[2], "keys kept by a query", "accuracy, %", "Trained and tested with selection")
        low = min(100 * row["mean"] for row in table["trained"])
        panels[2].set_ylim(max(0.0, low - 4), full + (full - low + 4) * 0.12)
        _lines(panels[2], [{**row, "selector": _trained_name(row)} for row in table["trained"]], "mean")
    for axes in panels[::2]:
        axes.axhline(full, color="#000000", linewidth=1.0)
        place = {"xycoords": ("axes fraction", "data"), "fontsize": 8.5}
        label(axes, f"full softmax {full:.1f}", (0.02, full), (0, 3), **place)
    save(page, path)


def _lines(axes: Axes, rows: Sequence[dict[str, Any]], quantity: str) -> None:
    """One line a selector, with the deviation over the seeds as bars."""
    counts = sorted({row["k"] for row in rows})
    logarithmic(axes, "x", counts, counts)
    ends = {}
    for name, look in LOOKS.items():
        own = [row for row in rows if row["selector"] == name]
        if own:
            x, y = [row["k"] for row in own], [100 * row[quantity] for row in own]
            draw(axes, x, y, look)
            if quantity == "mean":
                spread = [100 * (row["deviation"] or 0.0) for row in own]
                axes.errorbar(x, y, spread, fmt="none", ecolor=look.color, elinewidth=0.8, capsize=2)
            ends[name] = (x[-1], y[-1])
    name_lines(axes, ends, LOOKS)


def _title(table: dict[str, Any]) -> str:
    model, recipe = table["settings"]["model"], table["settings"]["recipe"]
    if not model:
        return str(table["settings"]["checkpoint"])
    tokens = (model["image_size"] // model["patch_size"]) ** 2 + 1
    return (
        f"ViT of {model['num_hidden_layers']} layers, {model['num_attention_heads']} heads, width "
        f"{model['hidden_size']}, {tokens} tokens, {recipe['epochs']} epochs; mean and deviation over seeds"
    )
