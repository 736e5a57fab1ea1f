"""The model that a predictor was fitted on, and checks of captures and files against it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from fewkeys.captures.capture import Capture
from fewkeys.core.tensor_files import Form, check
from fewkeys.core.validation import check_count
from fewkeys.papers.sparsefinder.settings import Settings
from fewkeys.papers.sparsefinder.space import kind_of


@dataclass(frozen=True)
class Shape:
    """The model a predictor was fitted on: the shape of its attention. `kind`: as in `space.kind_of`."""

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
    """Raise `TypeError` if it is not a capture, `ValueError` if the model has a distance bias."""
    if not isinstance(capture, Capture):
        raise TypeError(f"capture: expected a Capture, got {type(capture).__name__}; make one with fewkeys.capture")
    if capture.biased:
        raise ValueError(
            "capture: expected scores of queries and keys alone, got a model with a distance bias, which predicted "
            "graphs do not support; use fewkeys.tune"
        )


def check_same(capture: Capture, other: Capture) -> None:
    """Raise `ValueError` if the validation capture is of another model."""
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
    """Raise `ValueError` if the tensors do not fit such a model and settings."""
    heads, rank = shape.query_heads, shape.head_dim if raw else settings.rank
    forms: dict[str, Form] = {}
    for layer in range(shape.layers):
        if not raw:
            forms[f"maps.{layer}"] = _table(1 if settings.shared else 2, heads, shape.head_dim, rank)
        for side in ("query", "key", "gold-query", "gold-key"):
            forms[f"{side}.{layer}"] = _table(heads, None, rank)
    for name in tensors:
        match = re.fullmatch(r"(query-|key-)?centroids\.(\d{1,6})\.(\d{1,9})\.(\d{1,9})", name)
        if match is not None and int(match[2]) < shape.layers:
            forms[name] = _table(heads, int(match[3]) * int(match[4]), rank)
    try:
        check(tensors, forms)
    except ValueError as error:
        raise ValueError(
            f"directory: {where} says {shape.layers} layers of {heads} heads of dimension {shape.head_dim}, rank "
            f"{rank}: {error}; the files do not belong together, fit or save again"
        ) from None


def _table(*shape: int | None) -> Form:
    return Form(shape, torch.float32)
