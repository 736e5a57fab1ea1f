"""Learned tensors in plans: compared by content, named by a fingerprint, saved in separate files.

The JSON of a plan names learned values by their fingerprints; the tensors are beside it in safetensors files named
after the fingerprints. So a file can be checked against its name, and an older plan in the folder stays whole while a
new one is written.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from safetensors.torch import save
from torch import Tensor

from fewkeys.core.catalogue import Catalogue, Listed, is_taken
from fewkeys.core.files import write_whole
from fewkeys.core.tensor_files import fingerprint, loaded, plain


@dataclass(frozen=True, eq=False, repr=False)
class Learned(Listed, listed=False):
    """Base of frozen dataclasses all of whose fields are tensors. Two are equal when all their bits are."""

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The fields by name."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @cached_property
    def fingerprint(self) -> str:
        """32 hexadecimal digits from the class and every bit of the tensors, the same on all devices."""
        return fingerprint(type(self).__name__, self.tensors)

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and other.fingerprint == self.fingerprint

    def __hash__(self) -> int:
        return hash(self.fingerprint)

    def __repr__(self) -> str:
        shapes = ", ".join(f"{name}: {tuple(tensor.shape)}" for name, tensor in self.tensors.items())
        return f"{type(self).__name__}({shapes}; {self.fingerprint[:8]})"


LEARNED: Catalogue[Learned] = Catalogue(Learned)
"""The catalogue of values that a part of a plan may hold, saved and loaded with it."""


def file_name(mark: str) -> str:
    """The name of the file that holds the tensors of this fingerprint."""
    return f"learned-{mark}.safetensors"


def write_tensors(directory: str | os.PathLike[str], kind: str, tensors: Mapping[str, Tensor]) -> str:
    """Write tensors into `directory` (made if missing), whole or not at all; returns their fingerprint."""
    folder, mark = Path(directory), fingerprint(kind, tensors)
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(folder / file_name(mark), save(plain(tensors)))
    return mark


def read_tensors(directory: str | os.PathLike[str], kind: str, mark: object) -> dict[str, Tensor]:
    """The tensors of this fingerprint; `ValueError` if the file is missing or holds anything else."""
    path = Path(directory) / file_name(_checked(mark))
    try:
        tensors = loaded(path.read_bytes())
    except FileNotFoundError:
        raise ValueError(
            f"directory: expected {path.name} beside the description that names it, got no such file; copy the whole "
            "folder, or save again"
        ) from None
    except (OSError, ValueError) as error:
        raise ValueError(f"directory: {path} cannot be read ({error}); save again") from None
    if fingerprint(kind, tensors) != mark:
        raise ValueError(f"directory: {path} does not hold what its name says: a damaged or exchanged file; save again")
    return tensors


def _checked(mark: object) -> str:
    """A fingerprint read from a file, which must not lead to another folder."""
    if not isinstance(mark, str) or re.fullmatch("[0-9a-f]{32}", mark) is None:
        raise ValueError(f"directory: expected tensors named by 32 hexadecimal digits, got {mark!r}; save again")
    return mark


def pack(part: Any) -> dict[str, Any]:
    """A configuration dataclass as JSON-able values: its type and fields, learned values by their fingerprint."""
    if isinstance(part, Learned):
        return {"type": type(part).__name__, "tensors": part.fingerprint}
    if not is_dataclass(part):
        raise TypeError(f"plan: expected parts from fewkeys' catalogues, got {type(part).__name__}")
    if is_taken(type(part)):
        raise TypeError(
            f"plan: expected a class name that fewkeys does not use, got {type(part).__name__}; rename the class"
        )
    values = {field.name: getattr(part, field.name) for field in fields(part)}
    values = {name: pack(value) if is_dataclass(value) else value for name, value in values.items()}
    return {"type": type(part).__name__, **values}


def learned_parts(value: object) -> Iterator[Learned]:
    """The learned values in a configuration, at any depth."""
    if isinstance(value, Learned):
        yield value
    elif isinstance(value, tuple | list):
        for item in value:
            yield from learned_parts(item)
    elif is_dataclass(value):
        for field in fields(value):
            yield from learned_parts(getattr(value, field.name))


def save_learned(directory: str | os.PathLike[str], configuration: object) -> None:
    """Write a file for each distinct learned value in a configuration."""
    for part in set(learned_parts(configuration)):
        write_tensors(directory, type(part).__name__, part.tensors)


def load_learned(directory: str | os.PathLike[str], data: object) -> dict[str, Learned]:
    """The learned values of a description by fingerprint, read from the files beside it."""
    learned: dict[str, Learned] = {}

    def collect(value: object) -> None:
        if isinstance(value, list):
            for item in value:
                collect(item)
        elif isinstance(value, Mapping):
            mark, name = value.get("tensors"), value.get("type")
            if isinstance(mark, str) and isinstance(name, str) and mark not in learned:
                kind = LEARNED.get(name)
                if kind is not None:
                    learned[mark] = _made(directory, kind, mark)
            for item in value.values():
                collect(item)

    collect(data)
    return learned


def _made(directory: str | os.PathLike[str], kind: type[Learned], mark: str) -> Learned:
    """The learned value of this class whose tensors have the fingerprint `mark`."""
    tensors = read_tensors(directory, kind.__name__, mark)
    try:
        return kind(**tensors)
    except (TypeError, ValueError) as error:
        raise ValueError(f"directory: {file_name(mark)} holds no valid {kind.__name__}: {error}") from None
