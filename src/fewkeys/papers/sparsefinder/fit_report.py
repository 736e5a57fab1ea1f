"""What a fitted predictor finds on sequences it has not seen, beside what its edges would be worth at random."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fewkeys.captures.capture import Capture
from fewkeys.papers.sparsefinder.baselines.random_edges import RandomEdges
from fewkeys.papers.sparsefinder.graphs import score_graphs
from fewkeys.papers.sparsefinder.groupings import Grouping
from fewkeys.papers.sparsefinder.sparsefinder import Sparsefinder
from fewkeys.select import Selector, Window


@dataclass(frozen=True)
class Found:
    """Means over layers, heads and sequences of what `fewkeys.papers.sparsefinder.graphs.GraphScores` describes.

    `window` and `random` are the recall of a window and of random edges that keep as many keys per query.
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
) -> list[Found]:
    """Every grouping in the space of every finder, united with `keep`, on all layers of `capture`.

    `done(layers, of)` is called after every layer and pass.
    """
    alpha = next(iter(finders.values())).settings.alpha
    layers, step = range(capture.layers), 0

    def over_layers(selectors: Callable[[int], dict[str, Selector]]) -> dict[str, dict[str, float | None]]:
        nonlocal step
        found: dict[str, list[dict[str, float | None]]] = {}
        for layer in layers:
            for name, scores in score_graphs(capture, layer, selectors(layer), alpha=alpha).items():
                found.setdefault(name, []).append(scores.means())
            step += 1
            if done is not None:
                done(step, 2 * len(layers))
        return {name: _mean(rows) for name, rows in found.items()}

    def predicted(layer: int) -> dict[str, Selector]:
        rows: dict[str, Selector] = {}
        for space, finder in finders.items():
            for grouping in groupings:
                selector: Selector = finder.selector(layer, grouping)
                rows[f"{space}/{grouping}"] = selector if keep is None else selector | keep
        return rows

    def controls(_: int) -> dict[str, Selector]:
        counts = {max(1, round(float(row["slots"] or 0))) for row in own.values()}
        rows: dict[str, Selector] = {}
        for count in counts:
            rows |= {f"window/{count}": Window(count), f"random/{count}": RandomEdges(count)}
        return rows

    own = over_layers(predicted)
    chance = over_layers(controls)
    rows = []
    for space in finders:
        for grouping in groupings:
            scores: dict[str, Any] = own[f"{space}/{grouping}"]
            count = max(1, round(scores["slots"]))
            beside = {kind: chance[f"{kind}/{count}"]["recall"] for kind in ("window", "random")}
            rows.append(Found(str(grouping), space, **scores, **beside))  # type: ignore[arg-type]
    return rows


def _mean(rows: Sequence[Mapping[str, float | None]]) -> dict[str, float | None]:
    found: dict[str, float | None] = {}
    for name in rows[0]:
        values = [row[name] for row in rows]
        known = [value for value in values if value is not None]
        found[name] = sum(known) / len(known) if known else None
    return found
