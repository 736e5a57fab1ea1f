"""The catalogues: which classes are public and may be loaded by name, filled as the classes are defined.

A concrete class of this package enters by deriving from a `Listed` base, and so becomes loadable and a public name of
`fewkeys`. Names that begin with an underscore do not, nor do classes defined elsewhere: a name in a file never leads to
code that was not meant to be loaded. `class Mine(Selector, listed=True)` enters one of those, `listed=False` leaves one
out.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterator
from typing import Any, ClassVar, Generic, TypeVar

PACKAGE = __name__.partition(".")[0]

T = TypeVar("T")


class Listed:
    """Base of all that stands in a catalogue."""

    _known: ClassVar[dict[str, type[Any]]] = {}

    def __init_subclass__(cls, *, listed: bool | None = None, **options: Any) -> None:
        super().__init_subclass__(**options)
        ours = cls.__module__.partition(".")[0] == PACKAGE and not cls.__name__.startswith("_")
        if not (ours if listed is None else listed):
            return
        if cls.__name__ in Listed._known:
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

    def named(self) -> dict[str, type[T]]:
        """The classes by name."""
        return {kind.__name__: kind for kind in self}


def is_listed(kind: type[Any]) -> bool:
    """Whether the name of a class leads to it."""
    return Listed._known.get(kind.__name__) is kind


def is_taken(kind: type[Any]) -> bool:
    """Whether the name of a class leads to another one."""
    return Listed._known.get(kind.__name__, kind) is not kind
