"""Files of streams: plans and counts in the header, memory as tensors."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor

from fewkeys.core import tensor_files
from fewkeys.core.records import build
from fewkeys.core.tensor_files import FAULTS as FAULTS
from fewkeys.core.validation import check_count
from fewkeys.memory.rows import LeafType

FORMAT = 6

Contents = tuple[dict[str, Any], dict[str, Tensor]]
"""The header and the tensors of a stream."""


@dataclass(frozen=True)
class Facts:
    """A stream: its plans by `Plan.to_dict`, its arguments, the number of its tokens, their sizes (the numbers of
    `Kind`) and dtype, the largest magnitudes so far, and the number of the plan of each group.
    """

    plans: list[dict[str, Any]]
    scale: float | None
    leaves: LeafType | None
    length: int
    sizes: tuple[int, int, int, int] | None
    dtype: Literal["float64", "float32", "bfloat16", "float16"] | None
    largest: list[float]
    groups: list[int]

    def __post_init__(self) -> None:
        check_count("length", self.length, least=0)


def write(path: str | os.PathLike[str], kind: str, streams: Sequence[Contents]) -> None:
    """Write streams to one file, whole or not at all."""
    tensors = {f"{number}/{name}": part for number, (_, saved) in enumerate(streams) for name, part in saved.items()}
    tensor_files.write(path, kind, {"format": FORMAT, "streams": [facts for facts, _ in streams]}, tensors)


def read(path: str | os.PathLike[str], kind: str) -> list[tuple[Facts, dict[str, Tensor]]]:
    """All streams of a file; one of `FAULTS` if it is damaged or of another kind."""
    header, tensors = tensor_files.read(path, kind)
    if header["format"] != FORMAT:
        raise ValueError(f"expected format {FORMAT}, got {header['format']}")
    streams = [(build(Facts, facts), taken(tensors, f"{n}/")) for n, facts in enumerate(header["streams"])]
    if tensors:
        raise ValueError(f"expected tensors of {len(streams)} streams, got {', '.join(sorted(tensors))}")
    return streams


def taken(tensors: dict[str, Tensor], root: str) -> dict[str, Tensor]:
    """Take the tensors whose names begin with `root` out of `tensors`, by the rest of their names."""
    return {name.removeprefix(root): tensors.pop(name) for name in [*tensors] if name.startswith(root)}
