"""JSON that came from a file, checked: what is malformed, or not of the declared type, is a `ValueError`."""

from __future__ import annotations

import hashlib
import json
import math
import sys
import types
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from typing import Any, NoReturn, TypeVar, Union, get_args, get_origin, get_type_hints

T = TypeVar("T")

CHECKSUM = "checksum"
"""The key under which a sealed object carries the checksum of all its others."""
DEEPEST = 64
"""Levels of lists and objects in a file; Python's own limit ends in `RecursionError`."""


def parse(text: str | bytes) -> Any:
    """The value of a JSON text of UTF-8, without NaN or infinity, at most `DEEPEST` levels deep."""
    try:
        found = json.loads(text, parse_constant=_no_number, parse_float=_finite)
    except RecursionError:
        raise ValueError(f"more than {DEEPEST} levels of lists and objects") from None
    level = [found]
    for _ in range(DEEPEST):
        level = [item for value in level for item in _inside(value)]
        if not level:
            json.dumps(found, ensure_ascii=False).encode()  # refuses halves of surrogate pairs, which nothing can print
            return found
    raise ValueError(f"more than {DEEPEST} levels of lists and objects")


def _inside(value: Any) -> list[Any]:
    return list(value.values()) if isinstance(value, dict) else value if isinstance(value, list) else []


def _finite(number: str) -> float:
    value = float(number)
    return value if math.isfinite(value) else _no_number(number)


def _no_number(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number of JSON")


def seal(data: Mapping[str, Any]) -> dict[str, Any]:
    """The object with the checksum of its content."""
    return {**data, CHECKSUM: _digest(data)}


def unseal(data: Any) -> Any:
    """What was sealed; `ValueError` where it is not what it was. Objects without a checksum pass as they are."""
    if not isinstance(data, dict) or CHECKSUM not in data:
        return data
    found = {name: value for name, value in data.items() if name != CHECKSUM}
    if data[CHECKSUM] != _digest(found):
        raise ValueError(
            f"the content does not fit its {CHECKSUM}; save again, or leave out {CHECKSUM!r} after editing"
        )
    return found


def _digest(data: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(data, sort_keys=True, allow_nan=False).encode()).hexdigest()[:32]


def build(kind: type[T], data: Any) -> T:
    """The dataclass whose fields are the entries of `data`, which must be of the declared types.

    Fields with defaults may be missing. Understands bool, int, float, str, None, unions, lists, tuples, dicts with str
    keys, dataclasses of these, and `Any`.
    """
    if not isinstance(data, Mapping):
        raise ValueError(f"expected an object with the fields of {kind.__name__}, got {type(data).__name__}")
    known = {field.name: field for field in fields(kind)}  # type: ignore[arg-type]  # every caller passes a dataclass
    needed = {name for name, field in known.items() if field.default is MISSING and field.default_factory is MISSING}
    if odd := {*(data.keys() - known.keys()), *(needed - data.keys())}:
        raise ValueError(f"expected exactly the fields of {kind.__name__}, got a difference in {sorted(map(str, odd))}")
    hints = get_type_hints(kind)
    found = {name: _as(hints[name], value, name) for name, value in data.items()}
    try:
        return kind(**found)
    except TypeError as error:
        raise ValueError(str(error)) from None


def _as(hint: Any, value: Any, name: str) -> Any:
    """`value` as `hint` declares it."""
    origin, inner = get_origin(hint), get_args(hint)
    if hint is Any:
        return value
    if origin in (Union, types.UnionType):
        for one in inner:
            try:
                return _as(one, value, name)
            except ValueError:
                continue
    elif origin is list and isinstance(value, list):
        return [_as(inner[0], item, name) for item in value]
    elif origin is tuple and isinstance(value, list):
        return tuple(_as(inner[0], item, name) for item in value)
    elif origin in (dict, Mapping) and isinstance(value, dict):
        return {key: _as(inner[1], item, name) for key, item in value.items()}
    elif is_dataclass(hint) and isinstance(hint, type):
        return build(hint, value)
    elif hint is float and type(value) in (int, float) and abs(value) <= sys.float_info.max:
        return float(value)
    elif hint in (bool, int, str, type(None)) and type(value) is hint:
        return value
    told = getattr(hint, "__name__", None) if origin is None else str(hint)
    raise ValueError(f"{name}: expected {told or hint}, got {type(value).__name__} {str(value)[:60]!r}")
