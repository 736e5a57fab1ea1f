"""Rows of vectors: stored pass by pass during a run, in one file at its end."""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from time import monotonic
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fewkeys.core import tensor_files
from fewkeys.core.records import digest

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


class FinishedPasses:
    """The rows of finished passes by key, in memory and in a folder. Damaged files and other settings' are ignored."""

    def __init__(self, folder: Path, settings: dict[str, Any]) -> None:
        self._folder, self._kind = folder, f"rows of vectors by {digest(settings)}"
        self.rows: dict[str, TextRows] = {}
        self._new: dict[str, TextRows] = {}
        self._written = monotonic()
        for path in folder.glob("*.safetensors"):
            with suppress(OSError, ValueError):
                counts, tensors = tensor_files.read(path, self._kind)
                columns = (tensors[name].split(list(counts.values())) for name in TextRows._fields)
                self.rows |= dict(zip(counts, map(TextRows, *columns), strict=True))

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


def key_of(text: str) -> str:
    """The key of the pass over a text."""
    return hashlib.sha256(text.encode()).hexdigest()


def columns(passes: Mapping[str, Sequence[tuple[int, str]]], rows: Mapping[str, TextRows]) -> dict[str, Any]:
    """The columns of the output: paths as a list, others as arrays. passes: by path, the first character and text."""
    parts = [(path, first, rows[key_of(text)]) for path, texts in passes.items() for first, text in texts]
    joined = TextRows.joined(part._replace(spans=part.spans + first) for _, first, part in parts)
    vectors, spans, tokens, error = (tensor.numpy() for tensor in joined)
    start, stop = spans.T
    paths = [path for path, _, part in parts for _ in part.tokens]
    return {"path": paths, "start": start, "stop": stop, "tokens": tokens, "error": error, "vectors": vectors}


def save(path: Path, table: dict[str, Any], settings: Mapping[str, Any]) -> None:
    """Write `columns` to `path`, .npz or .parquet by its ending."""
    text = json.dumps(settings)
    if path.suffix == ".npz":
        import numpy as np

        np.savez(path, **table, settings=np.array(text))
        return
    import pyarrow as pa
    import pyarrow.parquet as pq

    vectors = table["vectors"]
    lists = pa.FixedSizeListArray.from_arrays(pa.array(vectors.ravel()), vectors.shape[1])
    data = pa.table(table | {"vectors": lists})
    pq.write_table(data.replace_schema_metadata({"fewkeys": text}), path)
