"""The catalogues: which classes are public and may be loaded by name, filled as the classes are defined.

A concrete class of this package is listed if it derives from a `Listed` base, and files can then name it. Classes whose
names begin with an underscore are not listed, nor are classes defined elsewhere: a name in a file cannot load
unexpected code. `class Mine(Selector, listed=True)` lists such a class, `listed=False` leaves one out.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterator
from importlib import import_module
from typing import Any, ClassVar, Generic, TypeVar

PACKAGE = __name__.partition(".")[0]

LATE = f"{PACKAGE}.papers"
"""A package that no other one imports: it is loaded on the first name that no loaded class has."""

T = TypeVar("T")


class Listed:
    """Base of all classes in catalogues."""

    _by_name: ClassVar[dict[str, type[Any]]] = {}

    def __init_subclass__(cls, *, listed: bool | None = None, **options: Any) -> None:
        super().__init_subclass__(**options)
        ours = cls.__module__.partition(".")[0] == PACKAGE and not cls.__name__.startswith("_")
        if not (ours if listed is None else listed):
            return
        if cls.__name__ in Listed._by_name or (cls.__module__.partition(".")[0] != PACKAGE and _kind(cls.__name__)):
            raise ValueError(
                f"{cls.__name__}: expected a name that is not in a catalogue yet, got that of "
                f"{Listed._by_name[cls.__name__].__module__}; rename it, or leave it out by listed=False"
            )
        Listed._by_name[cls.__name__] = cls


class Catalogue(Collection[type[T]], Generic[T]):
    """The listed concrete classes that derive from any of `bases`, in the order in which they were defined."""

    def __init__(self, *bases: type[Any]) -> None:
        self.bases = bases

    def __iter__(self) -> Iterator[type[T]]:
        # A class becomes abstract only after `__init_subclass__`; `issubclass` of abstract bases is slow.
        return (
            kind
            for kind in Listed._by_name.values()
            if any(base in kind.__mro__ for base in self.bases) and not inspect.isabstract(kind)
        )

    def __contains__(self, kind: object) -> bool:
        return any(kind is listed for listed in self)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def get(self, name: str) -> type[T] | None:
        """The class of this name; None if the catalogue has none."""
        kind = _kind(name)
        return kind if kind in self else None

    def named(self) -> dict[str, type[T]]:
        """The classes by name, as far as they are loaded."""
        return {kind.__name__: kind for kind in self}


def is_listed(kind: type[Any]) -> bool:
    """Whether the name of a class leads to it."""
    return Listed._by_name.get(kind.__name__) is kind


def is_taken(kind: type[Any]) -> bool:
    """Whether the name of a class leads to another one."""
    return not is_listed(kind) and _kind(kind.__name__) is not None


def _kind(name: str) -> type[Any] | None:
    """The class that a name leads to."""
    if name not in Listed._by_name:
        import_module(LATE)
    return Listed._by_name.get(name)
