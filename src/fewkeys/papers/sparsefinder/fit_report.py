"""The recall of a fitted predictor on unseen sequences, beside a window and random edges of the same number."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fewkeys.captures.capture import Capture
from fewkeys.papers.sparsefinder.graphs import score_graphs
from fewkeys.papers.sparsefinder.groupings import Grouping
from fewkeys.papers.sparsefinder.random_edges import RandomEdges
from fewkeys.papers.sparsefinder.sparsefinder import Sparsefinder
from fewkeys.select import Selector, Window


@dataclass(frozen=True)
class FitRow:
    """Means of `fewkeys.papers.sparsefinder.graphs.GraphScores` over layers, heads and sequences.

    `window` and `random`: the recall of a window and of random edges that keep as many keys per query.
    """

    name: str
    space: str
    recall: float
    sparsity: float
    exact: float
    slots: float
    computation: float | None
    entropy: float | None
    window: float
    random: float


def judge(
    finders: Mapping[str, Sparsefinder],
    capture: Capture,
    groupings: Sequence[Grouping],
    *,
    keep: Selector | None = None,
    done: Callable[[int, int], None] | None = None,
) -> list[FitRow]:
    """A row for every grouping in the space of every finder, united with `keep`, on all layers of `capture`.

    `done(layers, of)` is called after every layer and pass.
    """
    alpha = next(iter(finders.values())).settings.alpha
    layers, step = range(capture.layers), 0

    def over_layers(selectors: Callable[[int], dict[str, Selector]]) -> dict[str, dict[str, float | None]]:
        nonlocal step
        rows_by_name: dict[str, list[dict[str, float | None]]] = {}
        for layer in layers:
            for name, scores in score_graphs(capture, layer, selectors(layer), alpha=alpha).items():
                rows_by_name.setdefault(name, []).append(scores.means())
            step += 1
            if done is not None:
                done(step, 2 * len(layers))
        return {name: _mean(rows) for name, rows in rows_by_name.items()}

    def predicted(layer: int) -> dict[str, Selector]:
        rows: dict[str, Selector] = {}
        for space, finder in finders.items():
            for grouping in groupings:
                selector: Selector = finder.selector(layer, grouping)
                rows[f"{space}/{grouping}"] = selector if keep is None else selector | keep
        return rows

    def controls(_: int) -> dict[str, Selector]:
        counts = {max(1, round(float(row["slots"] or 0))) for row in predictions.values()}
        rows: dict[str, Selector] = {}
        for count in counts:
            rows |= {f"window/{count}": Window(count), f"random/{count}": RandomEdges(count)}
        return rows

    predictions = over_layers(predicted)
    chance = over_layers(controls)
    rows = []
    for space in finders:
        for grouping in groupings:
            scores: dict[str, Any] = predictions[f"{space}/{grouping}"]
            count = max(1, round(scores["slots"]))
            recalls = {kind: chance[f"{kind}/{count}"]["recall"] for kind in ("window", "random")}
            rows.append(FitRow(str(grouping), space, **scores, **recalls))  # type: ignore[arg-type]
    return rows


def _mean(rows: Sequence[Mapping[str, float | None]]) -> dict[str, float | None]:
    means: dict[str, float | None] = {}
    for name in rows[0]:
        values = [value for row in rows if (value := row[name]) is not None]
        means[name] = sum(values) / len(values) if values else None
    return means
