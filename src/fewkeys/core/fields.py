"""Growing arrays of rows, and operations of dataclasses of tensors, whose first dimensions are the batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Self

import torch
from torch import Tensor

LEAST, SPARE = 256, 8
"""The first capacity in rows; a larger one is the old one plus 1 / SPARE of it."""
DERIVED: Mapping[str, bool] = {"derived": True}
"""The metadata of a field that is computed from others and not saved."""


@dataclass(eq=False)
class Buffer:
    """`rows` (..., count, X) in `storage` (..., capacity, X). Appending a row moves SPARE others, on average."""

    storage: Tensor
    count: int = 0
    least: int = LEAST

    @property
    def rows(self) -> Tensor:
        return self.storage.narrow(-2, 0, self.count)

    def append(self, rows: Tensor) -> None:
        room, total = self.storage.shape[-2], self.count + rows.shape[-2]
        if total > room:
            # Many rows at once get no spare room: the prompt may be the whole stream.
            self.storage = self._moved(self.rows, max(self.least, total, room + room // SPARE))
        self.storage.narrow(-2, self.count, rows.shape[-2]).copy_(rows)
        self.count = total

    def holding(self, rows: Tensor) -> Buffer:
        """A buffer of the same kind with a copy of `rows`."""
        return Buffer(self._moved(rows, max(rows.shape[-2], self.storage.shape[-2])), rows.shape[-2], self.least)

    def __deepcopy__(self, memo: dict[int, Any]) -> Buffer:
        return self.holding(self.rows)

    @staticmethod
    def _moved(rows: Tensor, room: int) -> Tensor:
        with torch.inference_mode(False):  # or it could not be written to after `torch.inference_mode`
            storage = rows.new_empty((*rows.shape[:-2], room, rows.shape[-1]))
        storage[..., : rows.shape[-2], :] = rows
        return storage


class Fields:
    """Base of frozen dataclasses of tensors, `Buffer`s, other `Fields`, tuples of these, and facts, which stay."""

    def tensors(self, root: str = "") -> dict[str, Tensor]:
        """All tensors but those of `DERIVED` fields, by dotted names, in a fixed order."""
        leaves = [(name, leaf) for name, leaf, derived in _leaves(self, root) if not derived]
        return {name: leaf.rows if isinstance(leaf, Buffer) else leaf for name, leaf in leaves}

    def with_tensors(self, tensors: Mapping[str, Tensor], root: str = "") -> Self:
        """The same with the tensors of these names; `KeyError` where one is missing."""
        rebuilt: Self = _rebuilt(self, root, lambda leaf, name: tensors[name])
        return rebuilt

    def changed(self, change: Callable[[Tensor], Tensor]) -> Self:
        """The same with every tensor changed, those of `DERIVED` fields too."""
        rebuilt: Self = _rebuilt(self, "", lambda leaf, name: change(leaf))
        return rebuilt

    def select(self, index: Tensor) -> Self:
        """A copy of the sequences `index` (M,) of the batch."""
        return self.changed(lambda tensor: tensor[index])

    def bytes(self) -> int:
        """The bytes of all tensors. Shared memory counts once."""
        tensors = [leaf.storage if isinstance(leaf, Buffer) else leaf for _, leaf, _ in _leaves(self, "")]
        return sum({part.data_ptr(): part.numel() * part.itemsize for part in tensors if part.numel()}.values())


def _leaves(part: object, name: str, derived: bool = False) -> Iterator[tuple[str, Tensor | Buffer, bool]]:
    if isinstance(part, Tensor | Buffer):
        yield name, part, derived
    for inner_name, inner, is_derived in _inside(part, name):
        yield from _leaves(inner, inner_name, derived or is_derived)


def _inside(part: object, name: str) -> Iterator[tuple[str, object, bool]]:
    """The fields or items of a part: names, values, and whether they are derived."""
    root = f"{name}." if name else ""
    if type(part) is tuple:
        yield from ((f"{name}{number}", inner, False) for number, inner in enumerate(part))
    elif isinstance(part, Fields):
        for field in fields(part):  # type: ignore[arg-type]  # every subclass is a dataclass
            yield root + field.name, getattr(part, field.name), bool(field.metadata)


def _rebuilt(part: Any, name: str, change: Callable[[Tensor, str], Tensor]) -> Any:
    if isinstance(part, Tensor):
        return change(part, name)
    if isinstance(part, Buffer):
        return part.holding(change(part.rows, name))
    inside = {inner_name: _rebuilt(inner, inner_name, change) for inner_name, inner, _ in _inside(part, name)}
    if isinstance(part, Fields):
        return replace(part, **{key.rpartition(".")[2]: inner for key, inner in inside.items()})  # type: ignore[type-var]
    return tuple(inside.values()) if type(part) is tuple else part
