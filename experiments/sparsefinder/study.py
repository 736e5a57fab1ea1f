"""From a trained entmax model to points: captures, fitted predictors, recall and sparsity; finished steps are kept."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from experiments.sparsefinder.methods import Family, families
from experiments.sparsefinder.score import Point, score
from torch import Tensor

import fewkeys as fk
from fewkeys.captures.capture import Capture
from fewkeys.core.files import read_json, write_json
from fewkeys.papers import sparsefinder

ALPHA = 1.5
Say = Callable[[str], None]
Batches = Iterable[Mapping[str, Tensor]]


@dataclass(frozen=True)
class Fit:
    """How the projections are learned."""

    rank: int = 4
    shared: bool = True
    margin: float = 10.0
    rate: float = 1e-2
    epochs: int = 10
    sample: int = 2048

    @property
    def scale(self) -> float:
        """Of distances: the loss compares squares with the margin."""
        return self.margin**0.5


@dataclass(frozen=True)
class Predictors:
    """Of one part of a model: in the learned space, and with queries and keys as they are."""

    finder: sparsefinder.Sparsefinder
    raw: sparsefinder.Sparsefinder

    def families(self, fit: Fit, blocks: bool) -> Mapping[str, Family]:
        return families(self.finder, self.raw, blocks=blocks, scale=fit.scale)

    def save(self, work: Path) -> None:
        """Keep also the clusters that were asked for since."""
        self.finder.save_pretrained(work / "finder")
        self.raw.save_pretrained(work / "raw")


def learn(model: Any, part: str | None, train: Batches, held: Batches, fit: Fit, work: Path, say: Say) -> Predictors:
    """The predictors of one part, fitted on the queries and keys of `train`, stopped in time by those of `held`."""
    if (work / "raw" / "sparsefinder.json").is_file():
        return Predictors(*(sparsefinder.Sparsefinder.from_pretrained(work / name) for name in ("finder", "raw")))
    capture, validation = (_captured(model, part, batches) for batches in (train, held))
    say(f"fitting on {capture.sequences} sequences, {capture.tokens} tokens")
    finder = sparsefinder.Sparsefinder.fit(
        capture,
        rank=fit.rank,
        alpha=ALPHA,
        shared=fit.shared,
        margin=fit.margin,
        lr=fit.rate,
        epochs=fit.epochs,
        validation=validation,
        sample=fit.sample,
        directory=work / "epochs",
    )
    losses = [min(layer["validation"]) for layer in finder.record["layers"]]
    say(f"validation losses by layer: {', '.join(f'{loss:.3f}' for loss in losses)}")
    found = Predictors(finder, sparsefinder.Sparsefinder.raw(capture, alpha=ALPHA, sample=fit.sample))
    found.save(work)
    return found


def points(model: Any, part: str | None, test: Batches, own: Mapping[str, Family], work: Path, say: Say) -> list[Point]:
    """Recall and sparsity of every family on the queries and keys of `test`."""
    if not (work / "points.json").is_file():
        capture = _captured(model, part, test)
        say(f"scoring {sum(len(family.values) for family in own.values())} selectors, {capture.sequences} sequences")
        found = score(capture, own, ALPHA, lambda done, of: say(f"layer {done} of {of}"))
        write_json(work, "points.json", {"points": [asdict(point) for point in found]})
    return [Point(**point) for point in read_json(work, "points.json")["points"]]


def said(say: Say, what: str) -> Say:
    """`say` with a heading."""
    return partial(_said, say, what)


def _said(say: Say, what: str, text: str) -> None:
    say(f"{what}: {text}")


def _captured(model: Any, part: str | None, batches: Batches) -> Capture:
    return fk.capture(model, list(batches), weights=fk.weights.Entmax(ALPHA), part=part)  # type: ignore[arg-type]
