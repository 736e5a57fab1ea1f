"""Writes a capture."""

import os
import shutil
import tempfile
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from fewkeys.captures.capture import INDEX, PROJECTIONS, AttentionInputs, Capture, Facts, file_name
from fewkeys.core.files import write_json
from fewkeys.core.precision import working
from fewkeys.core.tensor_files import fingerprint, plain


class CaptureWriter:
    """Writes a capture: `write` for each layer in order, `end_batch` after each batch, then `finish`, which writes
    `capture.json`. A folder without it is not a capture.

    directory: a new or empty folder; None: a temporary one that is removed with the finished `Capture`.
    """

    def __init__(self, directory: str | os.PathLike[str] | None, model_name: str) -> None:
        self._model_name = model_name
        self._files: dict[str, str] = {}
        self._shape: dict[str, Any] = {}
        self._scales: list[float] = []
        self._layer = self._batches = self._sequences = self._tokens = 0
        self.directory = Path(tempfile.mkdtemp(prefix="fewkeys-capture-") if directory is None else directory)
        self._sound: set[str] = set()
        if directory is None:  # the finished capture and all its parts share this set: the folder goes with the last
            weakref.finalize(self._sound, shutil.rmtree, self.directory, ignore_errors=True)
        folders = [self.directory, *self.directory.parents]
        self._created = [x for x in folders if not x.exists()] if directory is not None else folders[:1]
        self.directory.mkdir(parents=True, exist_ok=True)
        if any(self.directory.iterdir()):
            raise ValueError(f"directory: expected a new or empty folder, got {self.directory}, which has files")

    def write(self, inputs: AttentionInputs) -> None:
        query, key, value = inputs.query, inputs.key, inputs.value
        shape = {
            "query_heads": query.shape[1],
            "kv_heads": key.shape[1],
            "head_dim": query.shape[3],
            "value_dim": value.shape[3],
            "is_causal": inputs.is_causal,
            "dtype": str(query.dtype).removeprefix("torch."),
        }
        if shape != self._shape and self._shape:
            raise ValueError(
                f"model: expected attention layers of one shape, got {self._shape} first and {shape} in layer "
                f"{self._layer}; such a model cannot be captured yet"
            )
        self._shape = shape
        if self._batches == 0:
            self._scales.append(float(inputs.scale))
        elif self._scales[self._layer : self._layer + 1] != [float(inputs.scale)]:
            raise ValueError(f"model: layer {self._layer} changed its scale, or is new, in batch {self._batches}")
        bias = None if inputs.distance_bias is None else working(inputs.distance_bias)
        masks = {"key_mask": inputs.key_mask, "query_mask": inputs.query_mask}
        tensors = {"query": query, "key": key, "value": value, "distance_bias": bias, **masks}
        self._save(file_name("layer", self._layer, self._batches), tensors)
        if self._layer == 0:
            self._sequences += query.shape[0]
            self._tokens += inputs.tokens
        self._layer += 1

    def write_gradients(self, gradients: Sequence[Tensor]) -> None:
        """Write the gradients of all calls of the current batch."""
        for layer, gradient in enumerate(gradients):
            self._save(file_name("gradient", layer, self._batches), {"gradient": gradient})

    def end_batch(self) -> None:
        if self._layer == 0 or self._layer != len(self._scales):
            raise ValueError(
                f"model: expected {len(self._scales) or 'some'} attention calls in each batch, got {self._layer}; "
                "is its attention replaced or skipped?"
            )
        self._layer = 0
        self._batches += 1

    def _save(self, name: str, tensors: Mapping[str, Tensor | None]) -> None:
        copies = plain({key: tensor for key, tensor in tensors.items() if tensor is not None})
        self._files[name] = fingerprint(name, copies)
        try:
            save_file(copies, self.directory / name)
        except SafetensorError as error:  # of a full disk
            fix = "make room, or name a larger disk (TMPDIR, for a temporary capture)"
            raise OSError(f"capture: {self.directory / name} cannot be written ({error}); {fix}") from None

    def finish(self, weights: Sequence[float] = (), projections: Mapping[int, Tensor] | None = None) -> Capture:
        """Write `capture.json` and return the capture. `weights`: as in `Facts`. `projections`: output projections
        (out, Hq Dv) by layer, as far as they were identified.
        """
        if self._batches == 0 or self._layer:
            raise ValueError("batches: expected at least one whole batch, got none")
        if projections:
            self._save(PROJECTIONS, {str(layer): matrix for layer, matrix in projections.items()})
        facts = Facts(
            model_name=self._model_name,
            layers=len(self._scales),
            **self._shape,
            scales=tuple(self._scales),
            batches=self._batches,
            sequences=self._sequences,
            tokens=self._tokens,
            weights=tuple(weights),
            gradients=file_name("gradient", 0, 0) in self._files,
            files=self._files,
        )
        write_json(self.directory, INDEX, asdict(facts))
        return Capture(directory=self.directory, _sound=self._sound, **vars(facts))

    def abort(self) -> None:
        """Remove what this writer has made."""
        for name in (*self._files, INDEX):
            (self.directory / name).unlink(missing_ok=True)
        with suppress(OSError):  # a folder holds other files: leave it
            for folder in self._created:
                folder.rmdir()
