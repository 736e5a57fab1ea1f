"""Rows of vectors: stored text by text during a run, written to one file at its end."""

from __future__ import annotations

import json
import secrets
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import Any

import torch
from torch import Tensor

from fewkeys.cli.files import publish
from fewkeys.core import tensor_files
from fewkeys.core.files import read_json, write_json
from fewkeys.core.tensor_files import FAULTS, Form

KIND = "rows of vectors"
SETTINGS = "settings.json"
SECONDS = 10.0
"""The most seconds of work that are lost when a run is killed."""


@dataclass(frozen=True, eq=False)
class TextRows:
    """The rows of one text: `vectors` (R, d), characters `spans` (R, 2), `tokens` (R,), and the plan's `error` (R,)."""

    vectors: Tensor
    spans: Tensor
    tokens: Tensor
    error: Tensor

    @staticmethod
    def joined(parts: Sequence[TextRows]) -> TextRows:
        """The rows of all parts, in order."""
        names = ("vectors", "spans", "tokens", "error")
        return TextRows(*(torch.cat([getattr(part, name) for part in parts]) for name in names))


class FinishedTexts:
    """The rows of finished texts by digest, in memory and in files of `folder`. Other `settings` begin anew."""

    def __init__(self, folder: Path, settings: Mapping[str, Any]) -> None:
        self.folder, self._settings = folder, dict(settings)
        self.rows: dict[str, TextRows] = {}
        self._new: dict[str, TextRows] = {}
        self._written = monotonic()
        if _settings(folder) != settings:
            self.remove()
        for path in sorted(folder.glob("*.safetensors")):
            self.rows.update(_read(path))

    def add(self, key: str, rows: TextRows) -> None:
        """Keep the rows of a text. They are written to disk within `SECONDS`."""
        self.rows[key] = self._new[key] = rows
        if monotonic() - self._written > SECONDS:
            self.write()

    def write(self) -> None:
        """Write all rows to disk."""
        if self._new:
            write_json(self.folder, SETTINGS, self._settings)
            every = TextRows.joined(list(self._new.values()))
            counts = {key: len(rows.tokens) for key, rows in self._new.items()}
            tensor_files.write(self.folder / f"{secrets.token_hex(8)}.safetensors", KIND, counts, vars(every))
        self._new, self._written = {}, monotonic()

    def remove(self) -> None:
        """Remove the folder; its rows are in the output file."""
        shutil.rmtree(self.folder, ignore_errors=True)


def _settings(folder: Path) -> Any:
    try:
        return read_json(folder, SETTINGS)
    except ValueError:
        return None


def _read(path: Path) -> dict[str, TextRows]:
    """The rows of texts in a file; none if it is damaged."""
    try:
        counts, tensors = tensor_files.read(path, KIND)
        total = sum(counts.values())
        forms = {"spans": Form((total, 2), torch.int64), "tokens": Form((total,), torch.int64)}
        forms |= {"vectors": Form((total, None), torch.float32), "error": Form((total,), torch.float64)}
        tensor_files.check(tensors, forms)
    except FAULTS:
        path.unlink(missing_ok=True)
        return {}
    parts = {name: tensor.split(list(counts.values())) for name, tensor in tensors.items()}
    return {key: TextRows(**{name: arrays[i] for name, arrays in parts.items()}) for i, key in enumerate(counts)}


def save(path: Path, names: Sequence[str], rows: Sequence[TextRows], settings: Mapping[str, Any]) -> None:
    """Write the rows of texts to `path`, NumPy's .npz or .parquet by its ending, whole or not at all.

    Columns: path, start, stop (characters), tokens, error, vectors.
    """
    every, text = TextRows.joined(rows), json.dumps(settings)
    files = [name for name, text_rows in zip(names, rows, strict=True) for _ in text_rows.tokens]
    start, stop = every.spans.unbind(1)
    columns = {"start": start, "stop": stop, "tokens": every.tokens, "error": every.error}
    arrays = {name: tensor.numpy() for name, tensor in columns.items()}
    write = _parquet if path.suffix == ".parquet" else _npz
    publish(
        path.absolute().parent, lambda folder: write(folder / path.name, files, arrays, every.vectors.numpy(), text)
    )


def _npz(path: Path, files: list[str], arrays: dict[str, Any], vectors: Any, settings: str) -> None:
    import numpy as np

    columns = {"path": np.array(files), **arrays, "vectors": vectors, "settings": np.array(settings)}
    np.savez(path, allow_pickle=False, **columns)


def _parquet(path: Path, files: list[str], arrays: dict[str, Any], vectors: Any, settings: str) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    flat = pa.FixedSizeListArray.from_arrays(pa.array(vectors.ravel()), vectors.shape[1])
    table = pa.table({"path": files, **arrays, "vectors": flat})
    pq.write_table(table.replace_schema_metadata({"fewkeys": settings}), path)
