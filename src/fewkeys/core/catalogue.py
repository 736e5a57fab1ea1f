"""The catalogues: which classes are public and may be loaded by name, filled as the classes are defined.

A concrete class of this package enters by deriving from a `Listed` base, and so becomes loadable. Names that begin with
an underscore do not, nor do classes defined elsewhere: a name in a file never leads to code that was not meant to be
loaded. `class Mine(Selector, listed=True)` enters one of those, `listed=False` leaves one out.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterator
from importlib import import_module
from typing import Any, ClassVar, Generic, TypeVar

PACKAGE = __name__.partition(".")[0]

LATE = f"{PACKAGE}.papers"
"""A room that no other imports: it is loaded when a name is asked for that no loaded class has."""

T = TypeVar("T")


class Listed:
    """Base of all that stands in a catalogue."""

    _known: ClassVar[dict[str, type[Any]]] = {}

    def __init_subclass__(cls, *, listed: bool | None = None, **options: Any) -> None:
        super().__init_subclass__(**options)
        ours = cls.__module__.partition(".")[0] == PACKAGE and not cls.__name__.startswith("_")
        if not (ours if listed is None else listed):
            return
        if cls.__name__ in Listed._known or (cls.__module__.partition(".")[0] != PACKAGE and _kind(cls.__name__)):
            raise ValueError(
                f"{cls.__name__}: expected a name that is not in a catalogue yet, got that of "
                f"{Listed._known[cls.__name__].__module__}; rename it, or leave it out by listed=False"
            )
        Listed._known[cls.__name__] = cls


class Catalogue(Collection[type[T]], Generic[T]):
    """The listed concrete classes that derive from any of `bases`, in the order in which they were defined."""

    def __init__(self, *bases: type[Any]) -> None:
        self.bases = bases

    def __iter__(self) -> Iterator[type[T]]:
        # Whether a class is abstract is known only after it has entered; `issubclass` of abstract bases is slow.
        return (
            kind
            for kind in Listed._known.values()
            if any(base in kind.__mro__ for base in self.bases) and not inspect.isabstract(kind)
        )

    def __contains__(self, kind: object) -> bool:
        return any(kind is known for known in self)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def get(self, name: str) -> type[T] | None:
        """The class of this name; None where the catalogue has none."""
        kind = _kind(name)
        return kind if kind in self else None

    def named(self) -> dict[str, type[T]]:
        """The classes by name, as far as they are loaded."""
        return {kind.__name__: kind for kind in self}


def is_listed(kind: type[Any]) -> bool:
    """Whether the name of a class leads to it."""
    return Listed._known.get(kind.__name__) is kind


def is_taken(kind: type[Any]) -> bool:
    """Whether the name of a class leads to another one."""
    return not is_listed(kind) and _kind(kind.__name__) is not None


def _kind(name: str) -> type[Any] | None:
    """The class that a name leads to."""
    if name not in Listed._known:
        import_module(LATE)
    return Listed._known.get(name)
