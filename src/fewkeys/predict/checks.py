"""What a predictor was fitted on, and whether captures and files fit it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from fewkeys.captures.capture import Capture
from fewkeys.core.validation import check_count
from fewkeys.predict.settings import Settings
from fewkeys.predict.space import kind_of


@dataclass(frozen=True)
class Shape:
    """The model a predictor was fitted on: what its attention must look like. `kind` is that of its queries."""

    model: str
    kind: str
    layers: int
    query_heads: int
    kv_heads: int
    head_dim: int


def shape_of(capture: Capture) -> Shape:
    """The model of a capture."""
    return Shape(
        capture.model_name, kind_of(capture), capture.layers, capture.query_heads, capture.kv_heads, capture.head_dim
    )


def check_capture(capture: object) -> None:
    """Raise `TypeError` for what is no capture."""
    if not isinstance(capture, Capture):
        raise TypeError(f"capture: expected a Capture, got {type(capture).__name__}; make one with fewkeys.capture")


def check_same(capture: Capture, other: Capture) -> None:
    """Raise `ValueError` where the validation capture is of another model."""
    names = ("layers", "query_heads", "kv_heads", "head_dim", "is_causal", "scales")
    for name in names:
        if getattr(capture, name) != getattr(other, name):
            raise ValueError(
                f"validation: expected a capture of the same model, got {name} {getattr(other, name)} against "
                f"{getattr(capture, name)}"
            )


def check_shape(shape: Shape) -> None:
    """Raise `TypeError` or `ValueError` for values that no model has."""
    for name in ("layers", "query_heads", "kv_heads", "head_dim"):
        check_count(name, getattr(shape, name))
    if shape.kind not in ("bidirectional", "causal", "cross"):
        raise ValueError(f"kind {shape.kind!r}")


def check_tensors(tensors: Mapping[str, Tensor], shape: Shape, settings: Settings, raw: bool, where: Path) -> None:
    """Raise `ValueError` where the tensors are not those of such a model and fit."""
    heads, rank = shape.query_heads, shape.head_dim if raw else settings.rank
    wanted: dict[str, tuple[int, ...]] = {}
    for layer in range(shape.layers):
        if not raw:
            wanted[f"maps.{layer}"] = (1 if settings.shared else 2, heads, shape.head_dim, rank)
        for side in ("query", "key", "gold-query", "gold-key"):
            found = tensors.get(f"{side}.{layer}")
            wanted[f"{side}.{layer}"] = (heads, found.shape[1] if found is not None and found.ndim == 3 else 0, rank)
    for name, tensor in tensors.items():
        kind, _, rest = name.partition(".")
        if kind.endswith("centroids"):
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
