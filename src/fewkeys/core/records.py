"""Checked reading of JSON: malformed text and values that are not of the declared type raise `ValueError`."""

import hashlib
import json
import sys
import types
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import MISSING, fields, is_dataclass
from typing import Any, Literal, NoReturn, TypeVar, Union, get_args, get_origin, get_type_hints

from fewkeys.core.catalogue import Listed, listed, named_class

T = TypeVar("T")
Load = Callable[[type[Any], object], Any]

CHECKSUM = "checksum"
"""The key of the checksum of all other entries of an object."""
DEEPEST = 64
"""The most levels of lists and objects in a file; beyond Python's limit there is only `RecursionError`."""


def parse(text: str | bytes) -> Any:
    """The value of a JSON text, without NaN or infinity, at most `DEEPEST` levels deep."""
    with suppress(RecursionError):
        value = json.loads(text)
        if _is_within(value, DEEPEST):
            # Refuses NaN, infinity and lone surrogates, which cannot be printed.
            json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
            return value
    raise ValueError(f"more than {DEEPEST} levels of lists and objects")


def _is_within(value: Any, levels: int) -> bool:
    inside = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return levels > 0 and all(_is_within(item, levels - 1) for item in inside if isinstance(item, dict | list))


def seal(data: Mapping[str, Any]) -> dict[str, Any]:
    """The object with its checksum."""
    return {**data, CHECKSUM: digest(data)}


def unseal(data: Any, *, required: bool = False) -> Any:
    """The object that was sealed; `ValueError` if it has changed, or lacks a required checksum."""
    if not isinstance(data, dict) or CHECKSUM not in data:
        if required:
            raise ValueError(f"expected an object with a {CHECKSUM}, as it was written")
        return data
    content = {name: value for name, value in data.items() if name != CHECKSUM}
    if data[CHECKSUM] != digest(content):
        raise ValueError(
            f"the content does not fit its {CHECKSUM}; save again, or leave out {CHECKSUM!r} after editing"
        )
    return content


def digest(data: Any) -> str:
    """32 hexadecimal digits that differ between JSON values."""
    return hashlib.sha256(json.dumps(data, sort_keys=True, allow_nan=False).encode()).hexdigest()[:32]


def not_here(kind: type[Any], mark: object) -> NoReturn:
    """The `Load` of descriptions that come without a folder."""
    raise ValueError(
        f"the description points to learned tensors ({kind.__name__} {mark}) and does not hold them; load it by "
        "from_pretrained from the folder it was saved in"
    )


def build(kind: type[T], data: Any, learned: Load = not_here) -> T:
    """The dataclass whose fields are the entries of `data`, which must be of the declared types.

    Fields with defaults may be missing. A field of a `Listed` class takes what `fewkeys.core.tensor_files.pack` makes.
    learned: loads the learned value of a class with a fingerprint.
    """
    if not isinstance(data, Mapping):
        raise ValueError(f"expected an object with the fields of {kind.__name__}, got {type(data).__name__}")
    declared = {field.name: field for field in fields(kind)}  # type: ignore[arg-type]  # every caller passes a dataclass
    needed = {name for name, field in declared.items() if field.default is MISSING and field.default_factory is MISSING}
    if odd := {*(data.keys() - declared.keys()), *(needed - data.keys())}:
        raise ValueError(f"expected exactly the fields of {kind.__name__}, got a difference in {sorted(map(str, odd))}")
    hints = get_type_hints(kind)
    values = {name: _as(hints[name], value, name, learned) for name, value in data.items()}
    try:
        return kind(**values)
    except TypeError as error:
        raise ValueError(str(error)) from None


def _as(hint: Any, value: Any, name: str, learned: Load) -> Any:
    origin, inner = get_origin(hint), get_args(hint)
    if hint is Any or (origin is Literal and value in inner):
        return value
    if origin in (Union, types.UnionType):
        options = [option for option in inner if (option is type(None)) == (value is None)]
        if len(options) == 1:
            return _as(options[0], value, name, learned)
        for option in options:
            with suppress(ValueError):
                return _as(option, value, name, learned)
    if isinstance(hint, type) and issubclass(hint, Listed) and isinstance(value, dict):
        return _listed(hint, value, name, learned)
    if origin is list and isinstance(value, list):
        return [_as(inner[0], item, name, learned) for item in value]
    if origin is tuple and isinstance(value, list):
        return tuple(_as(inner[0], item, name, learned) for item in value)
    if origin in (dict, Mapping) and isinstance(value, dict):
        return {key: _as(inner[1], item, name, learned) for key, item in value.items()}
    if is_dataclass(hint) and isinstance(hint, type):
        return build(hint, value, learned)
    if hint is float and type(value) in (int, float) and abs(value) <= sys.float_info.max:
        return float(value)
    if hint in (bool, int, str, type(None)) and type(value) is hint:
        return value
    expected = getattr(hint, "__name__", None) if origin is None else str(hint)
    raise ValueError(f"{name}: expected {expected or hint}, got {type(value).__name__} {str(value)[:60]!r}")


def _listed(base: type[Any], value: dict[str, Any], name: str, learned: Load) -> Any:
    kind_name = value.get("type")
    kind = named_class(kind_name) if isinstance(kind_name, str) else None
    kinds = listed(base)
    if kind is None or kind not in kinds.values():
        raise ValueError(f"{name}: expected one of {', '.join(sorted(kinds))}, got {kind_name!r}")
    if "tensors" in value:
        return learned(kind, value["tensors"])
    return build(kind, {key: item for key, item in value.items() if key != "type"}, learned)
