"""Sparsefinder: predicts the keys of entmax heads without scores."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from fewkeys.captures.capture import Capture, check_capture
from fewkeys.core.files import read_json, write_json
from fewkeys.core.precision import plain_defaults
from fewkeys.core.records import build
from fewkeys.core.tensor_files import fingerprint, read_tensors, write_tensors
from fewkeys.core.validation import check_count
from fewkeys.core.weights import Entmax, Weights
from fewkeys.model_plan import ModelPlan
from fewkeys.papers.sparsefinder.fitting import centroids, edges, gold_edges, joined, sample
from fewkeys.papers.sparsefinder.groupings import Buckets, ClusterPairs, Clusters, Grouping
from fewkeys.papers.sparsefinder.space import Centroids, Fitted, Projection
from fewkeys.papers.sparsefinder.train import Settings, learn
from fewkeys.plan import Plan
from fewkeys.select import Selector

FORMAT = 2
FILE = "sparsefinder.json"
NAME = "Sparsefinder"
SIDES = ("query", "key")


@dataclass(frozen=True)
class Shape:
    """The attention of a model. `kind`: "bidirectional", "causal" or "cross" (queries are other tokens than keys)."""

    model: str
    kind: str
    layers: int
    query_heads: int
    kv_heads: int
    head_dim: int

    @staticmethod
    def of(capture: Capture) -> Shape:
        same = all(c.query.shape[2] == c.key.shape[2] and c.query_mask is None for c in capture.calls(0))
        kind = "causal" if capture.is_causal else "bidirectional" if same else "cross"
        return Shape(capture.model_name, kind, capture.layers, capture.query_heads, capture.kv_heads, capture.head_dim)


@dataclass(frozen=True, eq=False)
class Sparsefinder:
    """Predicts which (query, key) pairs alpha-entmax heads will use. Fitted once per model.

    Every layer and head has projections `q' = W^Q q` and `k' = W^K k` to r dimensions, in which gold pairs, those with
    weight under entmax, are near. Groupings join queries and keys there:

        finder = fk.papers.sparsefinder.Sparsefinder.fit(capture)
        keep = finder.selector(3, fk.papers.sparsefinder.Clusters(8)) | fk.Window(3)
        output = fk.attention(q, k, v, keep=keep, weights=fk.weights.Entmax(1.5))
        with fk.apply(model, finder.plan(fk.papers.sparsefinder.Clusters(8), fk.Window(3))):
            output = model(**inputs)

    Args:
        shape, settings: the model, and how it was fitted.
        tensors: of each layer l the projections "maps.l" (1 or 2, Hq, D, r), absent in the raw space; samples of
            projected tokens "query.l", "key.l" (Hq, S, r) and of the ends of gold edges "gold-query.l", "gold-key.l"
            (Hq, E, r); and the centroids so far, "centroids.l.count.rounds" (Hq, rounds count, r),
            "query-centroids.l.count.1" and "key-centroids.l.count.1".
        record: the losses of the fit, as JSON values.

    Source: Treviso et al., Predicting Attention Sparsity in Transformers (arXiv 2109.12188), section 3.
    """

    shape: Shape
    settings: Settings
    tensors: dict[str, Tensor]
    record: Mapping[str, Any] = field(default_factory=dict, repr=False)

    @classmethod
    @plain_defaults()
    def fit(
        cls,
        capture: Capture,
        *,
        rank: int = 4,
        alpha: float = 1.5,
        shared: bool = True,
        margin: float = 1.0,
        lr: float = 1e-3,
        epochs: int = 3,
        batch: int = 32,
        validation: float | Capture = 0.1,
        patience: int = 3,
        sample: int = 2048,
        directory: str | os.PathLike[str] | None = None,
        progress: Callable[[int, int, str], None] | None = None,
        seed: int = 0,
    ) -> Self:
        """Learn the projections of every layer, by the loss in `fewkeys.papers.sparsefinder.train`.

        Args:
            capture: `fk.capture(model, batches, weights=fk.weights.Entmax(alpha))`, causal or not, self- or
                cross-attention, padded or not.
            rank: r.
            alpha: of the model's entmax.
            shared: one projection for queries and keys of a head, or one for each.
            margin, lr, epochs: of the hinge; of Adam; passes over the capture.
            batch: the most sequences per step, from one batch of the capture.
            validation: the share of the sequences, the last ones, that are held out: the maps kept are those of the
                epoch whose loss on them is least. Or another capture, or 0 for none.
            patience: epochs without a smaller validation loss after which a layer stops.
            sample: queries, and as many keys, of each head that groupings are fitted on; four times as many gold edges.
            directory: keeps finished layers, so that an interrupted fit continues.
            progress: called as `progress(done, total, what)`.

        Raises `TypeError` or `ValueError` for malformed arguments.

        Cost: exact entmax of every sequence in every epoch, O(n^2 D). Memory: 2^24 pairs. Deterministic.
        """
        fraction = 0.0 if isinstance(validation, Capture) else validation
        settings = Settings(rank, alpha, shared, margin, lr, epochs, batch, fraction, patience, sample, seed)
        _check(capture)
        fitted_on, held_out = _split(capture, validation)
        folder = None if directory is None else Path(directory)
        report = progress or (lambda *_: None)
        total = capture.layers * epochs * fitted_on.sequences
        tensors: dict[str, Tensor] = {}
        losses = []
        for layer in range(capture.layers):
            passed = layer * epochs * fitted_on.sequences

            def done(sequences: int, layer: int = layer) -> None:
                nonlocal passed
                passed += sequences
                report(passed, total, f"layer {layer + 1} of {capture.layers}")

            maps, record = learn(fitted_on, held_out, layer, settings, folder, done)
            losses.append(record)
            tensors |= {f"maps.{layer}": maps, **_samples(fitted_on, layer, settings, maps)}
        report(total, total, "done")
        return cls(Shape.of(capture), settings, tensors, {"layers": losses})

    @classmethod
    @plain_defaults()
    def raw(cls, capture: Capture, *, alpha: float = 1.5, sample: int = 2048, seed: int = 0) -> Self:
        """The control for learned spaces: groupings of queries and keys as they are, fitted on the `sample`."""
        _check(capture)
        settings = Settings(rank=capture.head_dim, alpha=alpha, sample=sample, seed=seed)
        samples = (_samples(capture, layer, settings) for layer in range(capture.layers))
        return cls(Shape.of(capture), settings, {name: rows for part in samples for name, rows in part.items()})

    @property
    def is_raw(self) -> bool:
        """Whether queries and keys are compared as they are."""
        return "maps.0" not in self.tensors

    def projection(self, layer: int) -> Projection | None:
        """The space of a layer, for the `project` of selectors; None: queries and keys as they are."""
        self._check_layer(layer)
        if self.is_raw:
            return None
        maps = self.tensors[f"maps.{layer}"]
        return Projection(maps[0], maps[-1])

    def centroids(self, layer: int, count: int, rounds: int = 1) -> Centroids:
        """`count` centroids for each head and round of a layer, by k-means on queries and keys together. They are kept,
        also by `save_pretrained`.
        """
        self._check_layer(layer)
        check_count("count", count)
        check_count("rounds", rounds)
        return Centroids(self._centroids("centroids", layer, SIDES, count, rounds))

    def _centroids(self, name: str, layer: int, sides: Sequence[str], count: int, rounds: int = 1) -> Tensor:
        name = f"{name}.{layer}.{count}.{rounds}"
        if name not in self.tensors:
            rows = torch.cat([self.tensors[f"{side}.{layer}"] for side in sides], 1)
            self.tensors[name] = centroids(rows, count, rounds, self.settings.seed)
        return self.tensors[name]

    def selector(self, layer: int, grouping: Grouping) -> Grouping:
        """The selector of the edges that `grouping` predicts in the space of a layer."""
        if not isinstance(grouping, Grouping):
            raise TypeError(
                f"grouping: expected Distance, Buckets, Clusters or ClusterPairs, got {type(grouping).__name__}"
            )
        return replace(grouping, project=self.projection(layer), fitted=self._fitted(layer, grouping))

    def _fitted(self, layer: int, grouping: Grouping) -> Fitted | None:
        tokens, ends = ([self.tensors[f"{kind}{side}.{layer}"] for side in SIDES] for kind in ("", "gold-"))
        if isinstance(grouping, Clusters):
            return self.centroids(layer, grouping.count, grouping.rounds)
        if isinstance(grouping, ClusterPairs):
            clusters = [self._centroids(f"{side}-centroids", layer, (side,), grouping.count) for side in SIDES]
            return joined(tokens, ends, clusters, grouping.lift)
        if isinstance(grouping, Buckets) and grouping.kind == "equal_size" and self.shape.kind != "bidirectional":
            return edges(tokens[0], tokens[1], grouping.beta)
        return None

    def plan(self, grouping: Grouping, keep: Selector | None = None, weights: Weights | None = None) -> ModelPlan:
        """A plan for every layer, for `fewkeys.apply`: the predicted edges united with those of `keep`.

        weights: by default `Entmax(alpha)` of the fit.
        """
        weights = Entmax(self.settings.alpha) if weights is None else weights
        selectors = [self.selector(layer, grouping) for layer in range(self.shape.layers)]
        plans = [Plan(rule if keep is None else rule | keep, weights=weights) for rule in selectors]
        return ModelPlan(tuple((plan,) * self.shape.kv_heads for plan in plans), {"sparsefinder": self.shape.model})

    def _check_layer(self, layer: int) -> None:
        if isinstance(layer, bool) or layer not in range(self.shape.layers):
            raise ValueError(f"layer: expected an integer from 0 to {self.shape.layers - 1}, got {layer!r}")

    def __str__(self) -> str:
        shape, space = self.shape, "as they are" if self.is_raw else f"in {self.settings.rank} dimensions"
        return f"Sparsefinder of {shape.layers} layers of {shape.query_heads} heads ({shape.kind}), {space}"

    def save_pretrained(self, directory: str | os.PathLike[str]) -> None:
        """Write `sparsefinder.json` and its tensors into `directory` (made if missing), each whole or not at all."""
        facts = {"shape": asdict(self.shape), "settings": asdict(self.settings), "raw": self.is_raw}
        mark = write_tensors(directory, _kind(facts), self.tensors)
        write_json(directory, FILE, {"format": FORMAT, **facts, "record": dict(self.record), "tensors": mark})

    @classmethod
    def from_pretrained(cls, directory: str | os.PathLike[str]) -> Self:
        """The predictor saved in `directory`: the same bits.

        Raises `ValueError` for another version, for missing or damaged files, and for tensors of another description.
        """
        data, where = read_json(directory, FILE), Path(directory) / FILE
        actual = data.get("format") if isinstance(data, Mapping) else type(data).__name__
        if actual != FORMAT:
            raise ValueError(f"directory: expected {where} of format {FORMAT}, got {actual!r}; fit again")
        try:
            description = build(_Description, data)
        except (TypeError, ValueError) as error:
            raise ValueError(f"directory: expected a whole description in {where}, got {error}; fit again") from None
        facts = {name: data[name] for name in ("shape", "settings", "raw")}
        tensors = read_tensors(directory, _kind(facts), description.tensors)
        return cls(description.shape, description.settings, tensors, description.record)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Sparsefinder):
            return NotImplemented
        one, two = ((it.shape, it.settings, fingerprint(NAME, it.tensors)) for it in (self, other))
        return one == two

    __hash__ = None  # type: ignore[assignment]  # it learns centroids on demand


@dataclass(frozen=True)
class _Description:
    """The content of `FILE`; `tensors`: their fingerprint."""

    format: int
    shape: Shape
    settings: Settings
    record: dict[str, Any]
    raw: bool
    tensors: str


def _kind(facts: Mapping[str, Any]) -> str:
    """The kind of the tensors in their fingerprint, which ties them to one description."""
    return f"{NAME} {json.dumps(facts, sort_keys=True)}"


def _check(capture: Capture) -> None:
    check_capture(capture)
    if capture.biased:
        raise ValueError(
            "capture: expected scores of queries and keys alone, got a model with a distance bias, which predicted "
            "graphs do not support; use fewkeys.tune"
        )


def _split(capture: Capture, validation: float | Capture) -> tuple[Capture, Capture | None]:
    """The sequences to learn from, and those that decide when to stop."""
    if isinstance(validation, Capture):
        for name in ("layers", "query_heads", "kv_heads", "head_dim", "is_causal", "scales"):
            ours, actual = getattr(capture, name), getattr(validation, name)
            if actual != ours:
                raise ValueError(
                    f"validation: expected a capture of the same model, got {name} {actual} against {ours}"
                )
        return capture, validation
    if not validation:
        return capture, None
    last = capture.sequences - max(1, round(validation * capture.sequences))
    if last <= 0:
        raise ValueError(
            f"validation: expected sequences left to learn from, got {capture.sequences} in all; capture more, or pass "
            "validation=0"
        )
    return capture.part(0, last), capture.part(last, capture.sequences)


def _samples(capture: Capture, layer: int, settings: Settings, maps: Tensor | None = None) -> dict[str, Tensor]:
    tokens = sample(capture, layer, settings.sample, settings.seed)
    ends = gold_edges(capture, layer, settings.alpha, 4 * settings.sample, settings.seed)
    tensors = {}
    for name, (query, key) in (("", tokens), ("gold-", ends)):
        tensors[f"{name}query.{layer}"] = (query if maps is None else query @ maps[0]).contiguous()
        tensors[f"{name}key.{layer}"] = (key if maps is None else key @ maps[-1]).contiguous()
    return tensors
