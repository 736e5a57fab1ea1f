"""The names that `dir` shows of a package: those that its `__init__` exports, not its modules."""

from collections.abc import Mapping
from types import ModuleType


def public_names(namespace: Mapping[str, object]) -> list[str]:
    """The public classes and functions in the `globals()` of a package."""
    return sorted(
        name
        for name, value in namespace.items()
        if not (name.startswith("_") or isinstance(value, ModuleType) or value is public_names)
    )
