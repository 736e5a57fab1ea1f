"""What `dir` shows of a room: the names that its `__init__` imports for others, not the files in the folder."""

from __future__ import annotations

from collections.abc import Mapping
from types import ModuleType


def public_names(namespace: Mapping[str, object]) -> list[str]:
    """The public classes and functions in the `globals()` of a room."""
    return sorted(
        name
        for name, value in namespace.items()
        if not (name.startswith("_") or isinstance(value, ModuleType) or value is public_names)
    )
