"""Files of tensors, with facts and a checksum in the header or named by a fingerprint. Every fault is a `ValueError`.

Kernels trust shapes: readers state the `Form` of each tensor. Learned tensors of plans are compared by content. The
JSON of a plan names their fingerprints: an older plan in the folder stays whole beside a newer one.
"""

import hashlib
import json
import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, is_dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load, load_file, save
from torch import Tensor

from fewkeys.core.catalogue import Listed, named_class
from fewkeys.core.files import write_whole
from fewkeys.core.records import CHECKSUM, digest, parse

FACTS = "fewkeys"
FAULTS = (SafetensorError, ValueError, KeyError, TypeError, AttributeError, RuntimeError, OverflowError, IndexError)
"""What reading a damaged file may raise."""


class Form(NamedTuple):
    """The shape of a tensor (None: any size), its dtype, the least number, and whether infinity is allowed."""

    shape: tuple[int | None, ...]
    dtype: torch.dtype
    least: float = -math.inf
    infinite: bool = False


def check(tensors: Mapping[str, Tensor], forms: Mapping[str, Form]) -> None:
    """Raise `ValueError` unless these are exactly the tensors of these forms."""
    if odd := sorted(tensors.keys() ^ forms.keys()):
        raise ValueError(f"expected the tensors {', '.join(sorted(forms))}, got a difference in {', '.join(odd)}")
    for name, form in forms.items():
        tensor, shape = tensors[name], tensors[name].shape
        fits = len(shape) == len(form.shape) and all(
            size in (None, got) for size, got in zip(form.shape, shape, strict=True)
        )
        if not fits or tensor.dtype != form.dtype:
            wanted = tuple("any" if size is None else size for size in form.shape)
            raise ValueError(f"expected {name} {wanted} of {form.dtype}, got {tuple(shape)} of {tensor.dtype}")
        if not tensor.numel() or tensor.dtype == torch.bool:
            continue
        if tensor.is_floating_point() and bool((tensor.isnan() if form.infinite else ~tensor.isfinite()).any()):
            raise ValueError(f"expected finite numbers in {name}, got NaN or infinity")
        if (least := tensor.min().item()) < form.least:
            raise ValueError(f"expected numbers of at least {form.least} in {name}, got {least}")


def write(path: str | os.PathLike[str], kind: str, facts: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Write facts (JSON values) and tensors to one safetensors file."""
    text, copies = json.dumps(facts, allow_nan=False), plain(tensors)
    write_whole(path, save(copies, {FACTS: text, CHECKSUM: fingerprint(f"{kind} {text}", copies)}))


def read(path: str | os.PathLike[str], kind: str) -> tuple[Any, dict[str, Tensor]]:
    """The facts and tensors that `write` wrote, on the CPU; `ValueError` for a damaged file or another kind."""
    data = Path(path).read_bytes()
    tensors = loaded(data)
    header = parse(data[8 : 8 + int.from_bytes(data[:8], "little")]).get("__metadata__") or {}
    if header.get(CHECKSUM) != fingerprint(f"{kind} {header.get(FACTS)}", tensors):
        raise ValueError(f"damaged, or not a {kind} of this version: the content does not fit its checksum")
    return parse(header[FACTS]), tensors


class LayerFile:
    """The file of a finished layer, with which an interrupted run can continue. Without a folder it is never there.

    Its name holds a digest of all facts that the layer depends on.
    """

    def __init__(self, folder: Path | None, kind: str, name: str, facts: Sequence[Any]) -> None:
        self.path, self.kind = None if folder is None else folder / f"{name}-{digest(facts)}.safetensors", kind

    def read(self, forms: Mapping[str, Form]) -> tuple[Any, dict[str, Tensor]] | None:
        """The facts and tensors; None if there is no file, or it is damaged or of other forms."""
        with suppress(OSError, ValueError):
            if self.path is not None:
                facts, tensors = read(self.path, self.kind)
                check(tensors, forms)
                return facts, tensors
        return None

    def write(self, facts: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        if self.path is not None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            write(self.path, self.kind, facts, tensors)


def loaded(source: bytes | Path) -> dict[str, Tensor]:
    """The tensors of a safetensors file, given its bytes, or, memory-mapped, its path."""
    try:
        with torch.device("cpu"):
            return load(source) if isinstance(source, bytes) else load_file(source)
    except FAULTS as error:
        raise ValueError(f"damaged: {error}") from None


def plain(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copies on the CPU: tensors in a file must not share memory."""
    form = torch.contiguous_format
    return {name: tensor.detach().cpu().clone(memory_format=form) for name, tensor in tensors.items()}


def fingerprint(kind: str, tensors: Mapping[str, Tensor]) -> str:
    """32 hexadecimal digits of named tensors, their dtypes and shapes, and the kind of the content."""
    content = hashlib.sha256(kind.encode())
    for name in sorted(tensors):
        tensor = tensors[name].detach().cpu().contiguous()
        content.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        content.update(tensor.view(-1).view(torch.uint8).numpy().data if tensor.numel() else b"")
    return content.hexdigest()[:32]


@dataclass(frozen=True, eq=False, repr=False)
class Learned(Listed, listed=False):
    """Base of frozen dataclasses of tensors. Two are equal when all their bits are."""

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The fields by name."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @cached_property
    def fingerprint(self) -> str:
        """32 hexadecimal digits of the class and the tensors, the same on all devices."""
        return fingerprint(type(self).__name__, self.tensors)

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and other.fingerprint == self.fingerprint

    def __hash__(self) -> int:
        return hash(self.fingerprint)

    def __repr__(self) -> str:
        shapes = ", ".join(f"{name}: {tuple(tensor.shape)}" for name, tensor in self.tensors.items())
        return f"{type(self).__name__}({shapes}; {self.fingerprint[:8]})"


def file_name(mark: str) -> str:
    """The file of the tensors of this fingerprint."""
    return f"learned-{mark}.safetensors"


def write_tensors(directory: str | os.PathLike[str], kind: str, tensors: Mapping[str, Tensor]) -> str:
    """Write tensors into `directory` (made if missing); returns their fingerprint."""
    folder, mark = Path(directory), fingerprint(kind, tensors)
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(folder / file_name(mark), save(plain(tensors)))
    return mark


def read_tensors(directory: str | os.PathLike[str], kind: str, mark: object) -> dict[str, Tensor]:
    """The tensors of a fingerprint; `ValueError` if its file is missing or holds anything else."""
    if not isinstance(mark, str) or re.fullmatch("[0-9a-f]{32}", mark) is None:  # else it could name another folder
        raise ValueError(f"directory: expected tensors named by 32 hexadecimal digits, got {mark!r}; save again")
    path = Path(directory) / file_name(mark)
    try:
        tensors = loaded(path.read_bytes())
        if fingerprint(kind, tensors) != mark:
            raise ValueError("another content than its name says")
    except (OSError, ValueError) as error:
        raise ValueError(
            f"directory: expected tensors in {path}, got {error}; copy the whole folder, or save again"
        ) from None
    return tensors


def pack(part: Any) -> dict[str, Any]:
    """A configuration as JSON values; learned values by their fingerprints."""
    kind = type(part).__name__
    if isinstance(part, Learned):
        return {"type": kind, "tensors": part.fingerprint}
    if not is_dataclass(part):
        raise TypeError(f"plan: expected parts from fewkeys' catalogues, got {kind}")
    if named_class(kind) not in (None, type(part)):
        raise TypeError(f"plan: expected a class name that fewkeys does not use, got {kind}; rename the class")
    values = ((field.name, getattr(part, field.name)) for field in fields(part))
    return {"type": kind, **{name: pack(value) if is_dataclass(value) else value for name, value in values}}


def learned_parts(value: object) -> Iterator[Learned]:
    """The learned values in a configuration, at any depth."""
    if isinstance(value, Learned):
        yield value
    elif isinstance(value, tuple | list):
        for item in value:
            yield from learned_parts(item)
    elif is_dataclass(value):
        yield from learned_parts([getattr(value, field.name) for field in fields(value)])


def load_learned(directory: str | os.PathLike[str], kind: type[Any], mark: object) -> Any:
    """The learned value of this class and fingerprint."""
    tensors = read_tensors(directory, kind.__name__, mark)
    try:
        return kind(**tensors)
    except (TypeError, ValueError) as error:
        raise ValueError(f"directory: expected a valid {kind.__name__}, got {mark}: {error}") from None
