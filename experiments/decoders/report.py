"""The figures as tables and a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import mean, quantiles
from typing import Any

from experiments.decoders.heads import SLOTS
from experiments.decoders.methods import EXACT, METHODS, OURS
from experiments.decoders.tasks import TASKS
from experiments.peers.picture import DECODERS

from fewkeys.report.style import draw, logarithmic, name_lines, save, say, sheet

Cells = list[dict[str, Any]]
LOOKS = DECODERS | {"constant memory": DECODERS["fewkeys, constant memory"]}


def table(cells: Cells) -> str:
    """Markdown: perplexity by text and length, retrieval by length, heads."""
    parts = [*_perplexity(_of(cells, "perplexity")), *_retrieval(_of(cells, "retrieval")), *_heads(_of(cells, "heads"))]
    return "\n\n".join(parts) + "\n"


def _of(cells: Cells, kind: str) -> Cells:
    return [{**cell, **cell["of"]} for cell in cells if cell["of"]["kind"] == kind]


def _rows(cells: Cells) -> list[tuple[str, int]]:
    """Methods and slots, by slots, in the order of the methods."""
    rows = {(cell["method"], cell["slots"]) for cell in cells if cell["method"] != EXACT}
    return sorted(rows, key=lambda row: (-row[1], METHODS.index(row[0])))


def _name(method: str, slots: int) -> str:
    return f"**{method} {slots}**" if method == OURS else f"{method} {slots}"


def _markdown(title: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [f"**{title}**", "", "| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)])


def _perplexity(cells: Cells) -> list[str]:
    tables = []
    for text, length in dict.fromkeys((cell["text"], cell["length"]) for cell in cells):
        mine = [cell for cell in cells if (cell["text"], cell["length"]) == (text, length)]
        exact = {cell["place"]: cell["perplexity"] for cell in mine if cell["method"] == EXACT}
        places = list(exact)
        head = ["method and slots", "paid", *(f"from {place} (exact {exact[place]:.2f})" for place in places)]
        rows = []
        for row in _rows(mine):
            by_place = {cell["place"]: cell for cell in mine if (cell["method"], cell["slots"]) == row}
            shown = [
                f"{by_place[at]['ratio']:.3f} (KL {by_place[at]['kl']:.3f})" if at in by_place else "not measured yet"
                for at in places
            ]
            rows.append([_name(*row), f"{mean(cell['paid'] for cell in by_place.values()):.0f}", *shown])
        if rows:
            tables.append(_markdown(f"{text}, {length:,} tokens: perplexity over exact attention's", head, rows))
    return tables


def _retrieval(cells: Cells) -> list[str]:
    tables = []
    for length in dict.fromkeys(cell["length"] for cell in cells):
        mine = [cell for cell in cells if cell["length"] == length]
        exact = {(cell["task"], cell["seed"]): cell for cell in mine if cell["method"] == EXACT}
        tasks = [task for task in TASKS if any(cell["task"] == task for cell in mine)]
        rows = []
        for row in [(EXACT, 0), *_rows(mine)]:
            of_row = [cell for cell in mine if (cell["method"], cell["slots"]) == row]
            of_row = [cell for cell in of_row if (cell["task"], cell["seed"]) in exact]
            if not of_row:
                continue
            pairs = [(cell, exact[cell["task"], cell["seed"]]) for cell in of_row]
            share = sum(cell["right"] for cell in of_row) / max(1, sum(best["right"] for _, best in pairs))
            lost = mean(best["likelihood"] - cell["likelihood"] for cell, best in pairs)
            shown = []
            for task in tasks:
                of_task = [cell for cell in of_row if cell["task"] == task]
                right, answers = (sum(cell[name] for cell in of_task) for name in ("right", "answers"))
                shown.append(f"{right:.0f} / {answers:.0f}" if of_task else "not measured yet")
            name = EXACT if row[0] == EXACT else _name(*row)
            paid = mean(cell["paid"] for cell in of_row)
            rows.append([name, f"{paid:.0f}", *shown, f"{share:.2f}", f"{lost:.2f}"])
        head = ["method and slots", "paid", *tasks, "share of exact's", "log-likelihood lost"]
        tables.append(_markdown(f"Retrieval at {length:,} tokens: answers that are right", head, rows))
    return tables


def _heads(cells: Cells) -> list[str]:
    tables = []
    for cell in cells:
        columns = {"keys that hold 99 % of the mass": _flat(cell["needed"])}
        for slots in SLOTS:
            columns[f"error, {slots} slots"] = _flat(cell["errors"][str(slots)])
            columns[f"error, {slots} best keys"] = _flat(cell["oracle"][str(slots)])
        cuts = {"lowest": min, "10th percentile": _cut(10), "median": _cut(50), "90th percentile": _cut(90)}
        cuts |= {"highest": max, "mean": mean}
        rows = []
        for name, values in columns.items():
            digits = 0 if "keys that" in name else 3
            rows.append([name, *(f"{cut(values):.{digits}f}" for cut in cuts.values())])
        title = f"{cell['text']}, {cell['length']:,} tokens: what the heads need"
        tables.append(_markdown(title, ["", *cuts], rows))
    return tables


def _cut(percent: int) -> Any:
    return lambda values: quantiles(values, n=100, method="inclusive")[percent - 1]


def _flat(layers: Sequence[Sequence[float]]) -> list[float]:
    return [value for layer in layers for value in layer]


def save_figure(cells: Cells, path: Path) -> None:
    """Perplexity and retrieval over the length, for the most slots of each; keys that heads need, by layer."""
    figure, (text, recall, heads) = sheet(
        "A real decoder with few slots", _about(cells), columns=3, size=(4.0, 3.6), names=1.75
    )
    _lines(text, _of(cells, "perplexity"), _mean_ratio, (1.0, 1.2, 1.5, 2.0, 3.0))
    say(text, "tokens", "over exact attention's", "Perplexity")
    _lines(recall, _of(cells, "retrieval"), _share)
    say(recall, "tokens", "share of exact attention's", "Right answers of retrieval")
    for cell in _of(cells, "heads")[:1]:
        needed = [sorted(layer) for layer in cell["needed"]]
        image = heads.imshow(list(zip(*needed, strict=True)), aspect="auto", cmap="magma_r", origin="lower")
        heads.grid(visible=False)
        figure.colorbar(image, cax=heads.inset_axes((1.04, 0.0, 0.04, 1.0)))
        say(heads, "layer", "head, those that need most on top", "Keys that hold 99 % of the mass")
    save(figure, path)


def _about(cells: Cells) -> str:
    """Which text, and at most how many slots."""
    texts = [cell["text"] for cell in _of(cells, "perplexity") + _of(cells, "heads")]
    slots = max((cell["of"].get("slots", 0) for cell in cells), default=0)
    return f"{texts[0] if texts else 'retrieval'} \u00b7 {slots} slots"


def _mean_ratio(cells: Cells, exact: Cells) -> float:
    return mean(cell["ratio"] for cell in cells)


def _share(cells: Cells, exact: Cells) -> float:
    best = {(cell["task"], cell["seed"]): cell["right"] for cell in exact}
    return sum(cell["right"] for cell in cells) / max(1, sum(best[cell["task"], cell["seed"]] for cell in cells))


def _lines(axes: Any, cells: Cells, figure: Any, marks: Sequence[float] | None = None) -> None:
    """A line for each method over the length, of the first text and the most slots. Logarithmic with `marks`."""
    cells = [cell for cell in cells if cell.get("text") == cells[0].get("text")]
    if not cells:
        return
    most, ends, values = max(cell["slots"] for cell in cells), {}, [1.0]
    lengths = sorted({cell["length"] for cell in cells})
    for method in METHODS[1:]:
        points = []
        for length in lengths:
            at = (method, most, length)
            measured = [cell for cell in cells if (cell["method"], cell["slots"], cell["length"]) == at]
            exact = [cell for cell in cells if (cell["method"], cell["length"]) == (EXACT, length)]
            if measured and exact:
                points.append((length, figure(measured, exact)))
        if points:
            draw(axes, *zip(*points, strict=True), LOOKS[method])
            ends[method] = points[-1]
            values += [value for _, value in points]
    axes.axhline(1.0, color="#999999", linewidth=1)
    logarithmic(axes, "x", lengths, lengths)
    low, high = min(values), max(values)
    if marks is None:
        axes.set_ylim(max(0.0, low - 0.05 * (high - low) - 0.01), high + 0.05 * (high - low) + 0.01)
    else:
        logarithmic(axes, "y", values, marks)
    name_lines(axes, ends, LOOKS)
