"""Learned tensors in plans: compared by content, saved in safetensors files named by their fingerprints.

The JSON of a plan names the fingerprints, too: an older plan in the folder stays whole beside a newer one.
"""

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from safetensors.torch import save
from torch import Tensor

from fewkeys.core.catalogue import Listed, named_class
from fewkeys.core.files import write_whole
from fewkeys.core.tensor_files import fingerprint, loaded, plain


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
