"""Rows of vectors: stored text by text during a run, in one file at its end."""

from __future__ import annotations

import json
import secrets
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from time import monotonic
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fewkeys.cli.files import publish
from fewkeys.core import tensor_files
from fewkeys.core.records import digest
from fewkeys.core.tensor_files import Form

SECONDS = 10.0
"""The most seconds of work that a killed run loses, beside the pass that it was in."""


class TextRows(NamedTuple):
    """The rows of a pass: `vectors` (R, d), characters `spans` (R, 2), `tokens` (R,), and the plan's `error` (R,)."""

    vectors: Tensor
    spans: Tensor
    tokens: Tensor
    error: Tensor

    @staticmethod
    def joined(parts: Iterable[TextRows]) -> TextRows:
        return TextRows(*map(torch.cat, zip(*parts, strict=True)))


class FinishedTexts:
    """The rows of finished passes by key, in memory and in a folder. Files of other `settings` are removed."""

    def __init__(self, folder: Path, settings: dict[str, Any]) -> None:
        self._folder, self._kind = folder, f"rows of vectors by {digest(settings)}"
        self.rows: dict[str, TextRows] = {}
        self._new: dict[str, TextRows] = {}
        self._written = monotonic()
        for path in sorted(folder.glob("*.safetensors")):
            self.rows.update(_read(path, self._kind))

    def add(self, key: str, rows: TextRows) -> None:
        self.rows[key] = self._new[key] = rows
        if monotonic() - self._written > SECONDS:
            self.write()

    def write(self) -> None:
        if self._new:
            self._folder.mkdir(parents=True, exist_ok=True)
            joined = TextRows.joined(self._new.values())
            counts = {key: len(rows.tokens) for key, rows in self._new.items()}
            path = self._folder / f"{secrets.token_hex(8)}.safetensors"
            tensor_files.write(path, self._kind, counts, joined._asdict())
        self._new, self._written = {}, monotonic()

    def remove(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)


def _read(path: Path, kind: str) -> dict[str, TextRows]:
    """The rows of texts in a file. A file that is damaged or of another kind is removed."""
    try:
        counts, tensors = tensor_files.read(path, kind)
        total = sum(counts.values())
        forms = {"spans": Form((total, 2), torch.int64), "tokens": Form((total,), torch.int64)}
        forms |= {"vectors": Form((total, None), torch.float32), "error": Form((total,), torch.float64)}
        tensor_files.check(tensors, forms)
    except ValueError:
        path.unlink(missing_ok=True)
        return {}
    parts = {name: tensor.split(list(counts.values())) for name, tensor in tensors.items()}
    return {key: TextRows(**{name: arrays[i] for name, arrays in parts.items()}) for i, key in enumerate(counts)}


def columns(rows: Mapping[str, TextRows]) -> dict[str, Any]:
    """The columns of the output: paths as a list, others as arrays."""
    vectors, spans, tokens, error = (tensor.numpy() for tensor in TextRows.joined(rows.values()))
    start, stop = spans.T
    paths = [path for path, text_rows in rows.items() for _ in text_rows.tokens]
    return {"path": paths, "start": start, "stop": stop, "tokens": tokens, "error": error, "vectors": vectors}


def save(path: Path, table: dict[str, Any], settings: Mapping[str, Any]) -> None:
    """Write `columns` to `path`, .npz or .parquet by its ending, whole or not at all."""
    write = _parquet if path.suffix == ".parquet" else _npz
    publish(path.absolute().parent, lambda folder: write(folder / path.name, table, json.dumps(settings)))


def _npz(path: Path, table: dict[str, Any], settings: str) -> None:
    import numpy as np

    np.savez(path, **table, settings=np.array(settings))


def _parquet(path: Path, table: dict[str, Any], settings: str) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    vectors = table["vectors"]
    lists = pa.FixedSizeListArray.from_arrays(pa.array(vectors.ravel()), vectors.shape[1])
    data = pa.table(table | {"vectors": lists})
    pq.write_table(data.replace_schema_metadata({"fewkeys": settings}), path)
