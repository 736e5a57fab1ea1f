"""A stream as one file: its plan and counters in the header, its memory as tensors."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from fewkeys.core import tensor_files
from fewkeys.core.records import build
from fewkeys.core.validation import check_count

FORMAT = 3
KIND, CACHE = "stream", "cache"
FAULTS = (ValueError, KeyError, TypeError, RuntimeError)
"""What the contents of a file may raise; RuntimeError: no state of a generator."""


@dataclass(frozen=True)
class Facts:
    """What the header says: the plan as `Plan.to_dict` gives it, the scale, how leaves are held, the tokens
    seen, and `Padded.facts`.
    """

    format: int
    plan: dict[str, Any]
    scale: float | None
    leaves: str | None
    length: int
    held: dict[str, Any]

    def __post_init__(self) -> None:
        if self.format != FORMAT:
            raise ValueError(f"expected format {FORMAT}, got {self.format}")
        check_count("length", self.length, least=0)


def write(path: str | os.PathLike[str], facts: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    """Write the file whole or not at all."""
    tensor_files.write(path, KIND, {"format": FORMAT, **facts}, tensors)


def read(path: str | os.PathLike[str]) -> tuple[Facts, dict[str, Tensor]]:
    """The facts and tensors of a file; `ValueError` where it is damaged or none of ours."""
    if not Path(path).is_file():
        raise FileNotFoundError(f"path: expected a file that Stream.save wrote, got {path}, which is no file")
    facts, tensors = tensor_files.read(path, KIND)
    return build(Facts, facts), tensors


@dataclass(frozen=True)
class Layers:
    """What the header of a cache says: the facts of every layer's stream, None where none has begun."""

    format: int
    layers: list[dict[str, Any] | None]

    def __post_init__(self) -> None:
        if self.format != FORMAT:
            raise ValueError(f"expected format {FORMAT}, got {self.format}")


def write_all(path: str | os.PathLike[str], layers: Sequence[tuple[dict[str, Any], dict[str, Tensor]] | None]) -> None:
    """Write the contents of all streams of a cache to one file, whole or not at all."""
    facts = [None if own is None else {"format": FORMAT, **own[0]} for own in layers]
    held = [{} if own is None else own[1] for own in layers]
    tensors = {f"{layer}/{name}": part for layer, own in enumerate(held) for name, part in own.items()}
    tensor_files.write(path, CACHE, {"format": FORMAT, "layers": facts}, tensors)


def read_all(path: str | os.PathLike[str]) -> list[tuple[Facts, dict[str, Tensor]] | None]:
    """The contents of all streams of a cache; `ValueError` for another file."""
    facts, tensors = tensor_files.read(path, CACHE)
    found: list[tuple[Facts, dict[str, Tensor]] | None] = []
    for layer, own in enumerate(build(Layers, facts).layers):
        root = f"{layer}/"
        held = {name.removeprefix(root): tensors.pop(name) for name in [*tensors] if name.startswith(root)}
        found.append(None if own is None else (build(Facts, own), held))
    if tensors:
        raise ValueError(f"expected tensors of {len(found)} layers, got {', '.join(sorted(tensors))}")
    return found
