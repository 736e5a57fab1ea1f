"""A stream as one file: its plan and counters in the header, its memory as tensors."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from fewkeys.core import tensor_files
from fewkeys.core.records import build
from fewkeys.core.validation import check_count

FORMAT = 2
KIND = "stream"


@dataclass(frozen=True)
class Facts:
    """What the header says: the plan as `Plan.to_dict` gives it, the scale, the tokens seen, and `Memory.facts`."""

    format: int
    plan: dict[str, Any]
    scale: float | None
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
