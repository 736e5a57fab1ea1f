"""The table and the picture of the results of `run.py`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from experiments.encoders.choose import Errors, by_place
from experiments.encoders.models import ENCODERS

from fewkeys.report.style import Look, draw, logarithmic, name_lines, save, say, sheet

CHOSEN, BUDGET, WITHOUT = "the rule", "fk.budget", "cohorts, no window"
SHARED, ORACLE = "fk.budget, 1 cohort", "best keys"
NAMES = {
    CHOSEN: "rule chosen on the others",
    BUDGET: "fk.budget",
    WITHOUT: "cohorts, no window",
    SHARED: "one cohort and a window",
    "random keys + window": "random keys + window",
    "key norm + window": "key norm + window",
    ORACLE: "best keys (oracle)",
}
LOOKS = {
    CHOSEN: Look("#009e73", width=3.4),
    BUDGET: Look("#cc79a7"),
    WITHOUT: Look("#d55e00"),
    SHARED: Look("#0072b2"),
    "random keys + window": Look("#767676", width=1.3, marker="x"),
    "key norm + window": Look("#a3a3a3", width=1.3, marker="+"),
    ORACLE: Look("#000000", marker="D"),
}


def lines(data: dict[str, Any], model: str) -> dict[str, dict[int, Sequence[float]]]:
    """By row and slots the mean error and that of the worst head, at the model's largest length. The rule is the one
    chosen on the other models.
    """
    at, length, errors = by_place(data["errors"]), max(ENCODERS[model].lengths), Errors(data["errors"])
    rule = next(row["rule"] for row in data["chosen"]["held_out"] if row["model"] == model)
    chosen = errors.of(next(each for each in errors.rules if str(each) == rule), model)
    rows: dict[str, dict[int, Sequence[float]]] = {name: {} for name in NAMES}
    for (name, long, slots), plans in at.items():
        if (name, long) == (model, length):
            for line, error in {**plans, CHOSEN: chosen[long, slots]}.items():
                if line in rows:
                    rows[line][slots] = error
    return rows


def table(data: dict[str, Any]) -> str:
    """Markdown: the choice, model by model; then mean error and worst head of every row at the largest lengths."""
    chosen = data["chosen"]
    text = [
        "A rule chosen on all models but one, on the one left out: its mean error and its worst head, as multiples of "
        "those of the best single rule for that model, and of the best rule at each length and number of slots.",
        "",
        "| left out | rule | error / best rule | / best at each | worst head / best rule | / best at each |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for row in chosen["held_out"]:
        kinds = [f"{kind} beside {name}" for kind in ("error", "worst") for name in ("best rule", "best at each")]
        text.append(
            f"| {row['model']}{row['and'] and ' and ' + row['and']} | {row['rule']} | "
            + " | ".join(f"{row[kind]:.2f}" for kind in kinds)
            + " |"
        )
    text += [
        "",
        f"On all models: {chosen['rule']}. Beside the best single rule for each: "
        + ", ".join(f"{model} {ratio:.2f}" for model, ratio in chosen["excess"].items())
        + ". `fk.budget`: "
        + ", ".join(f"{model} {ratio:.2f}" for model, ratio in chosen["excess of budget"].items())
        + ".",
        "",
        "| slots | outliers, window, means, rank, cohorts |",
        "| --- | --- |",
    ]
    text += [f"| {slots} | {cell} |" for slots, cell in chosen["cells"].items()]
    for model in dict.fromkeys(model for model, _, _ in by_place(data["errors"])):
        every = lines(data, model)
        slots = sorted({count for points in every.values() for count in points})
        text += ["", f"{ENCODERS[model].title}, {max(ENCODERS[model].lengths):,} tokens: mean error, worst head", ""]
        text += ["| slots | " + " | ".join(map(str, slots)) + " |", "| --- |" + " --- |" * len(slots)]
        for name, points in every.items():
            shown = [f"{points[count][0]:.3f}, {points[count][1]:.2f}" if count in points else "" for count in slots]
            text.append(f"| {NAMES[name]} | " + " | ".join(shown) + " |")
    return "\n".join(text) + "\n"


def save_picture(data: dict[str, Any], path: str | os.PathLike[str]) -> None:
    """Draw a panel for every model, mean error against slots at its largest length, as PNG."""
    models = list(dict.fromkeys(model for model, _, _ in by_place(data["errors"])))
    subtitle = "queries of all heads; the rule of each panel was chosen on the other models"
    figure, panels = sheet(
        "Error of attention with few keys, on encoders", subtitle, columns=2, rows=-(-len(models) // 2),
        size=(4.4, 3.4), names=2.4,
    )  # fmt: skip
    for axes, model in zip(panels, models, strict=False):
        every = {name: sorted(points.items()) for name, points in lines(data, model).items()}
        for name, points in every.items():
            draw(axes, [slots for slots, _ in points], [error for _, (error, _) in points], LOOKS[name])
        marks = sorted({slots for points in every.values() for slots, _ in points})
        logarithmic(axes, "x", marks, marks)
        logarithmic(axes, "y", [error for points in every.values() for _, (error, _) in points])
        say(axes, "slots per query", "mean relative output error", ENCODERS[model].title)
        ends = {NAMES[name]: (float(points[-1][0]), points[-1][1][0]) for name, points in every.items()}
        name_lines(axes, ends, {NAMES[name]: LOOKS[name] for name in every})
    for axes in panels[len(models) :]:
        axes.set_visible(False)
    save(figure, path)
