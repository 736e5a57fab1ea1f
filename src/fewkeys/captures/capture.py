"""The inputs of a model's attention layers, kept on disk: a folder with one safetensors file per layer and batch (two
with gradients), one with the output projections, and a `capture.json` that describes them.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.functional import pad

from fewkeys.core.impl import Impl
from fewkeys.core.inputs import Inputs
from fewkeys.core.records import build, digest, parse, unseal
from fewkeys.core.tensor_files import fingerprint, loaded
from fewkeys.core.validation import Options, check_inputs

INDEX = "capture.json"
PROJECTIONS = "projections.safetensors"


@dataclass(frozen=True, eq=False)
class AttentionInputs:
    """The inputs of one attention call: one layer on one batch.

    Shapes: `query` (B, Hq, Nq, D), `key` (B, Hkv, Nk, D), `value` (B, Hkv, Nk, Dv); `key_mask` bool (B, Nk), True for
    real keys, None if all are; `query_mask` (B, Nq) likewise if the queries are other tokens than the keys;
    `distance_bias` (Hq, 2 R + 1); `gradient` (B, Hq, Nq, Dv) of the output (`fewkeys.integrations.sensitivity`).

    Captures do not hold the other three. `window`: a query sees what `Window(window)` keeps. `softcap`: weights are
    those of `Softcap(softcap)`. `sink` (Hq,): one more score for every query of a head, with a value of zero.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    scale: float
    is_causal: bool
    key_mask: Tensor | None = None
    query_offset: int = 0
    query_mask: Tensor | None = None
    window: int | None = None
    softcap: float | None = None
    sink: Tensor | None = None
    distance_bias: Tensor | None = None
    gradient: Tensor | None = None

    def options(self, generator: torch.Generator | None = None, impl: Impl = "auto") -> Options:
        """The options of this call for `fewkeys.attention`."""
        options: Options = {"is_causal": self.is_causal, "scale": self.scale, "key_mask": self.key_mask}
        options |= {"query_offset": self.query_offset, "distance_bias": self.distance_bias}
        return options | {"generator": generator, "impl": impl}

    def checked(self, generator: torch.Generator | None = None, impl: Impl = "auto") -> Inputs:
        x = self if self.query_mask is None else self.apart()
        return check_inputs(x.query, x.key, x.value, **x.options(generator, impl))

    def apart(self) -> AttentionInputs:
        """The same call of cross-attention, in which padded keys say nothing about queries: with one more, where as
        many queries as keys would be taken for the same tokens.
        """
        if self.key_mask is None or self.is_causal or self.query.shape[2] != self.key.shape[2]:
            return self
        key, value = (pad(rows, (0, 0, 0, 1)) for rows in (self.key, self.value))
        return replace(self, key=key, value=value, key_mask=pad(self.key_mask, (0, 1)))

    @property
    def tokens(self) -> int:
        """The real tokens: queries where no mask marks the keys."""
        return len(self.query) * self.query.shape[2] if self.key_mask is None else int(self.key_mask.sum())

    @property
    def real_queries(self) -> Tensor | None:
        """(B, Nq) marks the queries of real tokens; None: all."""
        if self.query_mask is not None or self.query.shape[2] != self.key.shape[2]:
            return self.query_mask
        return self.key_mask

    def rows(self, index: slice) -> AttentionInputs:
        names = ("query", "key", "value", "key_mask", "query_mask", "gradient")  # a row for each sequence
        return replace(self, **{name: x[index] for name in names if (x := getattr(self, name)) is not None})


@dataclass(frozen=True, eq=False, kw_only=True)
class Facts:
    """The content of `capture.json`.

    Attributes:
        scales: the softmax scale of each layer.
        sequences, tokens: of all `batches`.
        weights: a number for each layer, which identifies the model; empty if unknown.
        gradients: whether every call holds its gradient.
        files: the fingerprint of each file of tensors, checked at the first read.
    """

    format_version: Literal[2] = 2
    model_name: str
    layers: int
    query_heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    scales: tuple[float, ...]
    is_causal: bool
    batches: int
    sequences: int
    tokens: int
    dtype: str
    weights: tuple[float, ...] = field(default=(), repr=False)
    gradients: bool = False
    files: Mapping[str, str] = field(default_factory=dict, repr=False)


@dataclass(frozen=True, eq=False, kw_only=True)
class Capture(Facts):
    """Queries, keys and values of every attention layer of a model on some batches, memory-mapped from `directory`.

    A temporary directory is removed with the object.
    """

    directory: Path
    _part: tuple[tuple[int, slice], ...] | None = field(default=None, repr=False)
    _sound: set[str] = field(default_factory=set, repr=False)

    def calls(self, layer: int) -> Iterator[AttentionInputs]:
        """The calls of a layer, one batch in memory at a time. `ValueError` for an unknown layer or a damaged file."""
        if layer not in range(self.layers):
            raise ValueError(f"layer: expected an integer from 0 to {self.layers - 1}, got {layer!r}")
        return (self._call(layer, batch).rows(rows) for batch, rows in self._ranges())

    def _ranges(self) -> tuple[tuple[int, slice], ...]:
        """The batches, each with the range of its sequences."""
        return self._part or tuple((batch, slice(None)) for batch in range(self.batches))

    def _call(self, layer: int, batch: int) -> AttentionInputs:
        tensors: dict[str, Any] = self._read(file_name("layer", layer, batch))
        if self.gradients:
            tensors |= self._read(file_name("gradient", layer, batch))
        offset = tensors["key"].shape[2] - tensors["query"].shape[2] if self.is_causal else 0
        return AttentionInputs(**tensors, scale=self.scales[layer], is_causal=self.is_causal, query_offset=offset)

    def _read(self, name: str) -> dict[str, Tensor]:
        try:
            tensors = loaded(self.directory / name)
            if name not in self._sound and self.files.get(name) != fingerprint(name, tensors):
                raise ValueError(f"the content does not fit the fingerprint in {INDEX}")
        except (OSError, ValueError) as error:
            raise ValueError(f"capture: {self.directory / name} cannot be read ({error}); capture again") from None
        self._sound.add(name)
        return tensors

    def digest(self, layer: int) -> str:
        """A fingerprint of a layer's tensors, scale and sequences."""
        beginnings = (f"layer{layer:03d}-", f"gradient{layer:03d}-", PROJECTIONS)
        files = sorted(item for item in self.files.items() if item[0].startswith(beginnings))
        return digest([files, self.scales[layer], self.is_causal, str(self._part)])

    @property
    def longest(self) -> int:
        """The tokens of the longest sequence, padding included."""
        return max(call.key.shape[2] for call in self.calls(0))

    @property
    def biased(self) -> bool:
        """Whether the model adds a distance bias to its scores."""
        return next(self.calls(0)).distance_bias is not None

    def part(self, start: int, stop: int) -> Capture:
        """The capture of sequences start .. stop - 1, in the same files."""
        if not 0 <= start < stop <= self.sequences:
            raise ValueError(
                f"start, stop: expected a range of the {self.sequences} captured sequences, got {start} .. {stop}"
            )
        part: list[tuple[int, slice]] = []
        first = tokens = 0
        for (batch, rows), call in zip(self._ranges(), self.calls(0), strict=True):
            low, high = max(start - first, 0), min(stop - first, len(call.query))
            if low < high:
                shift = rows.start or 0
                part.append((batch, slice(shift + low, shift + high)))
                tokens += call.rows(slice(low, high)).tokens
            first += len(call.query)
        return replace(self, batches=len(part), sequences=stop - start, tokens=tokens, _part=tuple(part))

    def projection(self, layer: int) -> Tensor | None:
        """The weights (out, Hq, Dv) of the layer's output projection without its bias; None: unknown."""
        weight = self._read(PROJECTIONS).get(str(layer)) if PROJECTIONS in self.files else None
        return None if weight is None else weight.view(-1, self.query_heads, self.value_dim)

    @classmethod
    def load(cls, directory: str | os.PathLike[str]) -> Capture:
        """Open a finished capture. Raises `ValueError` if `directory` holds none, or an unfinished one."""
        folder = Path(directory)
        if not (index := folder / INDEX).is_file():
            raise ValueError(f"directory: expected a capture with {INDEX}, got {folder} without; capture first")
        try:
            facts = build(Facts, unseal(parse(index.read_bytes()), required=True))
        except ValueError as error:
            raise ValueError(f"directory: {index} is damaged or of another version ({error}); capture again") from None
        return cls(directory=folder, **vars(facts))


def file_name(kind: str, layer: int, batch: int) -> str:
    """The file of a call's inputs ("layer") or of its gradient ("gradient")."""
    return f"{kind}{layer:03d}-batch{batch:05d}.safetensors"


def check_capture(capture: object) -> None:
    """Raise unless it is a capture with a token that is not padding."""
    if not isinstance(capture, Capture):
        raise TypeError(f"capture: expected a Capture, got {type(capture).__name__}; make one with fewkeys.capture")
    if capture.tokens == 0:
        raise ValueError("capture: expected at least one real token, got only padding; capture a text with tokens")
