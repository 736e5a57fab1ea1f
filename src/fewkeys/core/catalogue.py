"""The classes that may be loaded by name: the public concrete ones of this package that derive from `Listed`, and those
that ask for it by `class Mine(Selector, listed=True)`, so that a name in a file cannot load unexpected code.
"""

import inspect
from importlib import import_module
from typing import Any, ClassVar

PACKAGE = __name__.partition(".")[0]


class Listed:
    """Base of all classes in the catalogue."""

    _by_name: ClassVar[dict[str, type[Any]]] = {}

    def __init_subclass__(cls, *, listed: bool | None = None, **options: Any) -> None:
        super().__init_subclass__(**options)
        name, is_ours = cls.__name__, cls.__module__.partition(".")[0] == PACKAGE
        if not (is_ours and not name.startswith("_") if listed is None else listed):
            return
        if other := Listed._by_name.get(name) if is_ours else named_class(name):
            raise ValueError(f"{name}: expected a name that is not in a catalogue yet, got that of {other.__module__}")
        Listed._by_name[name] = cls


def listed(*bases: type[Any]) -> dict[str, type[Any]]:
    """The loaded concrete classes that derive from any of `bases`, in the order of their definition."""
    # A class becomes abstract only after `__init_subclass__`; `issubclass` of abstract bases is slow.
    return {
        name: kind
        for name, kind in Listed._by_name.items()
        if any(base in kind.__mro__ for base in bases) and not inspect.isabstract(kind)
    }


def named_class(name: str) -> type[Any] | None:
    """The listed class of this name, if there is one."""
    if name not in Listed._by_name:
        import_module(f"{PACKAGE}.papers")  # no other package imports it
    return Listed._by_name.get(name)
