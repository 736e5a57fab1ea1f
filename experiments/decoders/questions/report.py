"""The figures as a table for each number of slots, and a picture."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from experiments.decoders.methods import EXACT
from experiments.decoders.questions.memories import MEMORIES, OURS
from experiments.decoders.tasks import TASKS

from fewkeys.report.style import OTHERS, Look, draw, logarithmic, name_lines, save, say, sheet

Cells = list[dict[str, Any]]
Prompt = tuple[int, int, str]
"""Its tokens, its seed and its task."""
CONTROLS = ("sinks + window", "StreamingLLM", "key norm", "random keys")


def rows(cells: Cells, slots: int) -> list[dict[str, Any]]:
    """The sums of each row over the prompts that all rows have answered; the least KL first."""
    by_row: dict[str, dict[Prompt, dict[str, Any]]] = {}
    for cell in cells:
        if cell["of"]["slots"] in (0, slots):
            by_row.setdefault(cell["of"]["row"], {})[_prompt(cell)] = cell
    shared = [prompt for prompt in by_row.get(EXACT, ()) if all(prompt in cells_of for cells_of in by_row.values())]
    best = [by_row[EXACT][prompt] for prompt in shared]
    summed = []
    for row, by_prompt in by_row.items() if shared else ():
        mine = [by_prompt[prompt] for prompt in shared]
        right = {task: [0, 0] for _, _, task in shared}
        for cell in mine:
            right[cell["of"]["task"]][0] += cell["right"]
            right[cell["of"]["task"]][1] += cell["answers"]
        kl = [cell["kl"] for cell in mine]
        sums = {"row": row, "right": right, "kl": mean(kl)}
        sums["kl_off"] = stdev(kl) / math.sqrt(len(kl)) if len(kl) > 1 else math.nan
        sums["share"] = sum(cell["right"] for cell in mine) / max(1, sum(cell["right"] for cell in best))
        sums["lost"] = mean(cell["likelihood"] for cell in best) - mean(cell["likelihood"] for cell in mine)
        summed.append(sums | {what: mean(cell[what] for cell in mine) for what in ("slots", "read", "held")})
    return sorted(summed, key=lambda sums: sums["kl"])


def table(cells: Cells, slots: int) -> str:
    """Markdown."""
    shown = rows(cells, slots)
    tasks = [task for task in TASKS if any(task in row["right"] for row in shown)]
    head = [
        f"{slots} slots",
        "slots a query",
        "KB read",
        "MB held",
        *tasks,
        "share of exact's",
        "likelihood lost",
        "KL",
    ]
    lines = [head, ["---"] * len(head)]
    for row in shown:
        line = [
            row["row"],
            f"{row['slots']:.0f}",
            f"{row['read'] / 1e3:,.0f}",
            f"{row['held'] / 1e6:.1f}",
            *("{} / {}".format(*row["right"][task]) for task in tasks),
            f"{row['share']:.2f}",
            f"{row['lost']:.2f}",
            f"{row['kl']:.3f}" + ("" if math.isnan(row["kl_off"]) else f" ± {row['kl_off']:.3f}"),
        ]
        lines.append([f"**{cell}**" for cell in line] if row["row"] == OURS else line)
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def save_picture(cells: Cells, sizes: Sequence[int], path: Path) -> None:
    """KL against the bytes that a token reads, right answers against the bytes held; a line for each row."""
    sizes = sorted(sizes)
    points: dict[str, list[dict[str, Any]]] = {}
    for slots in sizes:
        for row in rows(cells, slots):
            if row["row"] != EXACT:
                points.setdefault(row["row"], []).append(row)
    if not points:
        return
    looks = _looks(list(points))
    figure, (distance, answers) = sheet(
        "Questions about a context that was read once",
        f"{' and '.join(map(str, sizes))} slots; the further left and the lower (left) or higher (right), the better",
        columns=2,
        size=(4.6, 5.2),
        names=2.6,
    )
    for axes, what, cost, unit in ((distance, "kl", "read", 1e3), (answers, "share", "held", 1e6)):
        ends = {}
        for name, line in points.items():
            x, y = [row[cost] / unit for row in line], [row[what] for row in line]
            draw(axes, x, y, looks[name])
            ends[name] = (x[-1], y[-1])
        costs = [row[cost] / unit for line in points.values() for row in line]
        logarithmic(axes, "x", costs, [10, 20, 30, 50, 100, 200, 300, 500, 1000, 2000])
        if what == "kl":
            logarithmic(axes, "y", [row["kl"] for line in points.values() for row in line])
        name_lines(axes, ends, looks)
    say(distance, "KB that a layer reads for a token", "KL(exact || row)", "Distance of the predictions")
    say(answers, "MB that the whole cache holds", "share of exact attention's", "Right answers")
    save(figure, path)


def _looks(names: Sequence[str]) -> dict[str, Look]:
    """This package in green, controls in grey, each rival in another colour."""
    marks, greys = "sD^vhPpdX", iter(["#767676", "#8a8a8a", "#a3a3a3", "#bcbcbc"])
    dashes = iter(["-", (0, (4, 2)), (0, (1, 1.6)), (0, (6, 1, 1, 1)), "-"])
    looks, rivals = {}, 0
    for name in names:
        if name in CONTROLS:
            looks[name] = Look(next(greys), (0, (1, 1.6)), 1.3, "x")
        elif name in MEMORIES:
            looks[name] = Look("#009e73", next(dashes), 3.4 if name == OURS else 1.8, "o")
        else:
            looks[name] = Look(OTHERS[rivals % len(OTHERS)], "-", 1.5, marks[rivals % len(marks)])
            rivals += 1
    return looks


def _prompt(cell: dict[str, Any]) -> Prompt:
    of = cell["of"]
    return of["length"], of["seed"], of["task"]
