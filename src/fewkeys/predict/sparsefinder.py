"""Sparsefinder: where will an entmax head look? Learned once per model, answered before any score is computed."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from fewkeys.files import read_json, write_json
from fewkeys.learned import fingerprint, read_tensors, write_tensors
from fewkeys.measure.capture import Capture
from fewkeys.model_plan import ModelPlan
from fewkeys.plan import Plan
from fewkeys.predict.settings import Settings
from fewkeys.predict.space import centroids, edges, kind_of, sample
from fewkeys.predict.train import learn
from fewkeys.select import Buckets, Centroids, Clusters, Edges, Grouping, Predicted, Projection, Selector
from fewkeys.validation import check_count
from fewkeys.weights import Entmax, Weights

FORMAT = 1
FILE = "sparsefinder.json"
NAME = "Sparsefinder"

Progress = Callable[[int, int, str], None]


@dataclass(frozen=True)
class Shape:
    """The model a predictor was fitted on: what its attention must look like. `kind` is that of its queries."""

    model: str
    kind: str
    layers: int
    query_heads: int
    kv_heads: int
    head_dim: int


@dataclass(frozen=True, eq=False)
class Sparsefinder:
    """Predicts which (query, key) pairs alpha-entmax heads will use.

    For every layer and head, projections `q' = W^Q q` and `k' = W^K k` to r dimensions in which gold pairs are near:
    the pairs to which alpha-entmax gives weight in a `Capture` of the model. Groupings then join queries and keys
    there:

        finder = fk.Sparsefinder.fit(capture)
        keep = finder.selector(3, fk.Clusters(8)) | fk.Window(3)
        output = fk.attention(q, k, v, keep=keep, weights=fk.Entmax(1.5))
        with fk.apply(model, finder.plan(fk.Clusters(8), fk.Window(3))):
            output = model(**inputs)

    Args:
        shape: the model it was fitted on.
        settings: how it was fitted.
        tensors: per layer l, "maps.l" (1 or 2, Hq, D, r), one projection for queries and keys or one for each (absent
            in the raw space), and a sample of projected queries "query.l" (Hq, S, r) and keys "key.l"; and the
            centroids that were asked for so far, "centroids.l.count.rounds" (Hq, rounds count, r).
        record: the losses of the fit, as JSON values.

    Source: Treviso, Gois, Fernandes, Fonseca, Martins, "Predicting Attention Sparsity in Transformers" (arXiv
    2109.12188), section 3.
    """

    shape: Shape
    settings: Settings
    tensors: dict[str, Tensor]
    record: Mapping[str, Any] = field(default_factory=dict, repr=False)

    @classmethod
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
        progress: Progress | None = None,
        seed: int = 0,
    ) -> Self:
        """Learn the projections of every layer. The loss is in `fewkeys.predict.loss`.

        Args:
            capture: queries and keys of a model whose attention is alpha-entmax: `fk.capture(model, batches,
                weights=fk.Entmax(alpha))`. Whether it is causal, cross-attention or padded, the capture tells.
            rank: r.
            alpha: of the model's entmax.
            shared: one projection for queries and keys of a head, or one for each.
            margin, lr, epochs: of the hinge; of Adam; passes over the capture. Few sequences need more than 3 passes.
            batch: sequences per step, at most; those of one step come from one batch of the capture.
            validation: the share of the sequences, the last ones, that are only used to stop early: the maps kept are
                those of the epoch whose loss on them is least. Another capture instead, or 0 for none.
            patience: epochs without a smaller validation loss after which a layer stops.
            sample: queries, and as many keys, of each head that are remembered for fitting clusters and buckets.
            directory: where the state after each epoch is kept, so that an interrupted fit goes on as if it had not
                been; None: nowhere.
            progress: called as `progress(done, total, what)`.
            seed: of everything random.

        Raises:
            TypeError, ValueError: malformed arguments, naming them.

        Cost: exact entmax of every sequence in every epoch, O(n^2 D). Memory: 2^24 pairs. Deterministic.
        """
        share = 0.0 if isinstance(validation, Capture) else validation
        settings = Settings(rank, alpha, shared, margin, lr, epochs, batch, share, patience, sample, seed)
        _check_capture(capture)
        fitted_on, held_out = capture, validation if isinstance(validation, Capture) else None
        if held_out is not None:
            _check_same(capture, held_out)
        elif share:
            count = max(1, round(share * capture.sequences))
            if count >= capture.sequences:
                raise ValueError(
                    f"validation: expected sequences left to learn from, got {capture.sequences} in all; capture more, "
                    "or pass validation=0"
                )
            fitted_on = capture.part(0, capture.sequences - count)
            held_out = capture.part(capture.sequences - count, capture.sequences)
        tensors: dict[str, Tensor] = {}
        losses = []
        total = capture.layers * epochs * fitted_on.sequences
        for layer in range(capture.layers):
            passed = layer * epochs * fitted_on.sequences

            def done(sequences: int, layer: int = layer) -> None:
                nonlocal passed
                passed += sequences
                if progress is not None:
                    progress(passed, total, f"layer {layer + 1} of {capture.layers}")

            state = learn(fitted_on, held_out, layer, settings, None if directory is None else Path(directory), done)
            tensors[f"maps.{layer}"] = state.best
            losses.append({"loss": state.losses, "validation": state.validation})
            _sample_into(tensors, fitted_on, layer, settings)
        if progress is not None:
            progress(total, total, "done")
        return cls(_shape(capture), settings, tensors, {"layers": losses})

    @classmethod
    def raw(cls, capture: Capture, *, alpha: float = 1.5, sample: int = 2048, seed: int = 0) -> Self:
        """The same groupings without projection, on queries and keys as they are: the control that learns no space.

        Clusters and bucket edges are still fitted, on the `sample`.
        """
        _check_capture(capture)
        settings = Settings(rank=capture.head_dim, alpha=alpha, sample=sample, seed=seed)
        tensors: dict[str, Tensor] = {}
        for layer in range(capture.layers):
            _sample_into(tensors, capture, layer, settings)
        return cls(_shape(capture), settings, tensors)

    @property
    def is_raw(self) -> bool:
        """Whether the space is that of queries and keys as they are."""
        return "maps.0" not in self.tensors

    def projection(self, layer: int) -> Projection | None:
        """The space of a layer, None for queries and keys as they are; for every selector with a `project`."""
        self._check_layer(layer)
        if self.is_raw:
            return None
        maps = self.tensors[f"maps.{layer}"]
        return Projection(maps[0], maps[-1])

    def centroids(self, layer: int, count: int, rounds: int = 1) -> Centroids:
        """Centroids of a layer by k-means (scikit-learn) on the sample, `count` for each head and round.

        Found at the first call and kept, also by `save_pretrained`.
        """
        self._check_layer(layer)
        name = f"centroids.{layer}.{check_count('count', count)}.{check_count('rounds', rounds)}"
        if name not in self.tensors:
            rows = self.tensors[f"query.{layer}"], self.tensors[f"key.{layer}"]
            self.tensors[name] = centroids(*rows, count, rounds, self.settings.seed).place
        return Centroids(self.tensors[name])

    def edges(self, layer: int, beta: int) -> Edges:
        """Where `beta` buckets of equal size begin in the sample of a layer, for every head and dimension."""
        self._check_layer(layer)
        return edges(self.tensors[f"query.{layer}"], self.tensors[f"key.{layer}"], check_count("beta", beta))

    def selector(self, layer: int, grouping: Grouping, *, head: int | None = None) -> Predicted:
        """The edges that `grouping` predicts in a layer: a selector, to be united with others by `|`.

        head: the key head it is for, where heads have plans of their own; None: all.
        """
        if not isinstance(grouping, Grouping):
            raise TypeError(f"grouping: expected Distance, Buckets or Clusters, got {type(grouping).__name__}")
        own, groups = slice(None), self.shape.query_heads // self.shape.kv_heads
        if head is not None:
            if isinstance(head, bool) or head not in range(self.shape.kv_heads):
                raise ValueError(f"head: expected an integer from 0 to {self.shape.kv_heads - 1}, got {head!r}")
            own = slice(head * groups, (head + 1) * groups)
        project, fitted = self.projection(layer), None
        if project is not None:
            project = Projection(project.query[own], project.key[own])
        if isinstance(grouping, Clusters):
            fitted = Centroids(self.centroids(layer, grouping.count, grouping.rounds).place[own])
        elif isinstance(grouping, Buckets) and grouping.kind == "equal_size" and self.shape.kind != "bidirectional":
            both = self.edges(layer, grouping.beta)
            return Predicted(grouping, project, Edges(both.query[own], both.key[own]))
        return Predicted(grouping, project, fitted)

    def plan(self, grouping: Grouping, keep: Selector | None = None, weights: Weights | None = None) -> ModelPlan:
        """A plan for every layer: the predicted edges, and those of `keep` beside them, as `fewkeys.apply` takes it.

        weights: default `Entmax(alpha)` of the fit.
        """
        layers = []
        for layer in range(self.shape.layers):
            found: Selector = self.selector(layer, grouping)
            kernel = Entmax(self.settings.alpha) if weights is None else weights
            layers.append((Plan(found if keep is None else found | keep, weights=kernel),) * self.shape.kv_heads)
        return ModelPlan(tuple(layers), {"sparsefinder": self.shape.model})

    def __str__(self) -> str:
        space = "as they are" if self.is_raw else f"in {self.settings.rank} dimensions"
        shape = self.shape
        return f"Sparsefinder of {shape.layers} layers of {shape.query_heads} heads ({shape.kind}), {space}"

    def _check_layer(self, layer: int) -> None:
        if isinstance(layer, bool) or layer not in range(self.shape.layers):
            raise ValueError(f"layer: expected an integer from 0 to {self.shape.layers - 1}, got {layer!r}")

    def save_pretrained(self, directory: str | os.PathLike[str]) -> None:
        """Write `sparsefinder.json` and its tensors into `directory` (made if missing); never a half-written file."""
        mark = write_tensors(directory, NAME, self.tensors)
        facts = {"shape": asdict(self.shape), "settings": asdict(self.settings), "record": dict(self.record)}
        write_json(directory, FILE, {"format": FORMAT, **facts, "raw": self.is_raw, "tensors": mark})

    @classmethod
    def from_pretrained(cls, directory: str | os.PathLike[str]) -> Self:
        """The predictor saved in `directory`: the same bits.

        Raises `ValueError` for another version, and where a file is missing, damaged, or does not fit the other: layer
        count, head count, dimensions.
        """
        data = read_json(directory, FILE)
        where = Path(directory) / FILE
        if not isinstance(data, Mapping) or data.get("format") != FORMAT:
            found = data.get("format") if isinstance(data, Mapping) else type(data).__name__
            raise ValueError(f"directory: expected {where} of format {FORMAT}, got {found!r}; fit again")
        try:
            shape, settings = Shape(**data["shape"]), Settings(**data["settings"])
            mark, raw, record = data["tensors"], data["raw"], dict(data["record"])
            _check_shape(shape)
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"directory: expected a whole description in {where}, got {error}; fit again") from None
        tensors = read_tensors(directory, NAME, mark)
        _check_tensors(tensors, shape, settings, bool(raw), where)
        return cls(shape, settings, tensors, record)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Sparsefinder):
            return NotImplemented
        own = (self.shape, self.settings, fingerprint(NAME, self.tensors))
        return own == (other.shape, other.settings, fingerprint(NAME, other.tensors))

    __hash__ = None  # type: ignore[assignment]  # it learns centroids on demand


def _shape(capture: Capture) -> Shape:
    return Shape(
        capture.model_name,
        kind_of(capture),
        capture.layers,
        capture.query_heads,
        capture.kv_heads,
        capture.head_dim,
    )


def _sample_into(tensors: dict[str, Tensor], capture: Capture, layer: int, settings: Settings) -> None:
    query, key = sample(capture, layer, settings.sample, settings.seed)
    if f"maps.{layer}" in tensors:
        maps = tensors[f"maps.{layer}"]
        query, key = query @ maps[0], key @ maps[-1]
    tensors[f"query.{layer}"], tensors[f"key.{layer}"] = query.contiguous(), key.contiguous()


def _check_capture(capture: object) -> None:
    if not isinstance(capture, Capture):
        raise TypeError(f"capture: expected a Capture, got {type(capture).__name__}; make one with fewkeys.capture")


def _check_same(capture: Capture, other: Capture) -> None:
    names = ("layers", "query_heads", "kv_heads", "head_dim", "is_causal", "scales")
    for name in names:
        if getattr(capture, name) != getattr(other, name):
            raise ValueError(
                f"validation: expected a capture of the same model, got {name} {getattr(other, name)} against "
                f"{getattr(capture, name)}"
            )


def _check_shape(shape: Shape) -> None:
    for name in ("layers", "query_heads", "kv_heads", "head_dim"):
        check_count(name, getattr(shape, name))
    if shape.kind not in ("bidirectional", "causal", "cross"):
        raise ValueError(f"kind {shape.kind!r}")


def _check_tensors(tensors: Mapping[str, Tensor], shape: Shape, settings: Settings, raw: bool, where: Path) -> None:
    """Raise `ValueError` where the tensors are not those of such a model and fit."""
    heads, rank = shape.query_heads, shape.head_dim if raw else settings.rank
    wanted: dict[str, tuple[int, ...]] = {}
    for layer in range(shape.layers):
        if not raw:
            wanted[f"maps.{layer}"] = (1 if settings.shared else 2, heads, shape.head_dim, rank)
        for side in ("query", "key"):
            found = tensors.get(f"{side}.{layer}")
            wanted[f"{side}.{layer}"] = (heads, found.shape[1] if found is not None and found.ndim == 3 else 0, rank)
    for name, tensor in tensors.items():
        kind, _, rest = name.partition(".")
        if kind == "centroids":
            layer, count, rounds = (int(part) for part in rest.split("."))
            if layer < shape.layers:
                wanted[name] = (heads, count * rounds, rank)
        elif name not in wanted:
            continue
        if tensor.dtype != torch.float32:
            raise ValueError(f"directory: expected float32 tensors beside {where}, got {tensor.dtype} in {name}")
    got = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    if got != wanted:
        name = next(name for name in sorted({*got, *wanted}) if got.get(name) != wanted.get(name))
        raise ValueError(
            f"directory: {where} says {shape.layers} layers of {heads} heads of dimension {shape.head_dim}, rank "
            f"{rank}, so expected {name} of shape {wanted.get(name)}, got {got.get(name)}; the files do not belong "
            "together, fit or save again"
        )
