"""A stream as one safetensors file: its plan and counters as JSON in the header, its memory as tensors."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from fewkeys.core.files import write_whole

FORMAT = 1
KEY = "fewkeys.stream"


def write(path: str | os.PathLike[str], facts: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    """Write the file whole or not at all."""
    header = {KEY: json.dumps({"format": FORMAT, **facts})}
    data = save({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}, metadata=header)
    write_whole(path, data)


def read(path: str | os.PathLike[str], device: torch.device | str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The facts and tensors of a file; `ValueError` where it is damaged or none of ours."""
    if not Path(path).is_file():
        raise FileNotFoundError(f"path: expected a file that Stream.save wrote, got {path}, which is no file")
    try:
        with safe_open(path, framework="pt", device=str(device)) as file:
            header = json.loads((file.metadata() or {}).get(KEY, "{}"))
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
    except (SafetensorError, ValueError, OSError) as error:
        raise ValueError(
            f"path: expected a file that Stream.save wrote, got {path}, which is damaged ({error})"
        ) from None
    if header.get("format") != FORMAT:
        raise ValueError(f"path: expected a stream of format {FORMAT}, got {header.get('format')!r} in {path}")
    return header, tensors
