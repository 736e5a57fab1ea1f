"""Sequences of a batch that are padded alike go together, and padding goes nowhere: memories see real tokens alone.

Positions are counted over real tokens, so a sequence answers as it would alone, wherever its padding stands.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, Self

import torch
from torch import Tensor

from fewkeys.core.records import build
from fewkeys.execute import dispatch
from fewkeys.execute.problem import Problem

Gaps = tuple[tuple[int, int], ...]
"""Where padding stands: places from the first on, before the second."""


class Memory(Protocol):
    """What a stream holds of sequences whose real tokens come together."""

    def begin(self, key: Tensor, value: Tensor) -> Self:
        """The same before the first token, in the shape of keys (B, Hkv, any, D) and values (B, Hkv, any, Dv)."""

    def make_room(self, query: Tensor | None, key: Tensor, value: Tensor) -> None:
        """Make room for what `take` will be given; `OSError` where there is none, and nothing has changed."""

    def take(self, query: Tensor | None, key: Tensor, value: Tensor, scale: float) -> Iterator[Tensor | Problem]:
        """Take tokens in, key (B, Hkv, N, D) and value (B, Hkv, N, Dv), and give, span after span, the outputs
        (B, Hq, n, Dv) of their queries (B, Hq, N, D), if there are any, or the problem that is still to be answered.

        What follows a problem may be asked for once it is answered.
        """

    def select(self, index: Tensor) -> Self:
        """The sequences `index` (M,), in memory of their own."""

    def refusal(self, count: int) -> str | None:
        """Why what came after the first `count` tokens cannot be forgotten any more, None where it can."""

    def crop(self, count: int) -> None:
        """Forget what came after the first `count` tokens, which is not refused."""

    def merge(self, other: Self) -> None:
        """Go on as if the tokens of another memory of the same plan had come next."""

    def like(self) -> tuple[Tensor, Tensor]:
        """Keys and values (B, Hkv, any, D or Dv) of the kind that is held."""

    def bytes(self) -> int:
        """How much memory that takes."""

    def tensors(self) -> dict[str, Tensor]:
        """What is to be written to a file, by name."""

    def facts(self) -> dict[str, Any]:
        """What else is to be written, as JSON knows it."""

    def restored(self, count: int, facts: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Self:
        """What `facts` and `tensors` gave after `count` tokens; `ValueError` where that is no such memory."""


@dataclass(frozen=True, eq=False)
class Group:
    """Sequences `rows` (M,) of the batch, where they are padded, and what is held of them."""

    rows: Tensor
    gaps: Gaps
    memory: Memory

    def by_padding(self, real: Tensor) -> list[Group]:
        """Parts that are padded alike in `real` (B, N)."""
        kinds, kind = real[self.rows].unique(dim=0, return_inverse=True)
        if len(kinds) == 1:
            return [self]
        some = [(kind == number).nonzero().squeeze(-1) for number in range(len(kinds))]
        return [Group(self.rows[which], self.gaps, self.memory.select(which)) for which in some]

    def padded(self, real: Tensor, first: int) -> Group:
        """The same with the padding of `real` (N,), from place `first` on."""
        edges = torch.nn.functional.pad(~real, (1, 1)).int().diff().nonzero().squeeze(-1) + first
        return replace(self, gaps=_joined(self.gaps, tuple(map(tuple, edges.view(-1, 2).tolist()))))

    def count(self, length: int) -> int:
        """Real tokens among the first `length`."""
        return length - sum(min(stop, length) - start for start, stop in self.gaps if start < length)


@dataclass(frozen=True)
class _Facts:
    """What the header of a file says of a group."""

    gaps: list[list[int]]
    held: dict[str, Any]


@dataclass(frozen=True)
class _Groups:
    """What it says of all of them."""

    groups: list[_Facts]


class Padded:
    """What a stream holds: groups of sequences, and `length`, the tokens so far, padding included."""

    def __init__(self, empty: Memory) -> None:
        self._empty = empty
        self.length = 0
        self._groups: list[Group] = []

    def take(self, query: Tensor | None, key: Tensor, value: Tensor, real: Tensor, scale: float) -> Tensor:
        """As `Memory.take`, of tokens of which `real` (B, N) are; the outputs of padding are zero.

        `OSError` where there is no room for them, and then none of them has been taken.
        """
        if not self._groups:
            rows = torch.arange(key.shape[0], device=key.device)
            self._groups = [Group(rows, (), self._empty.begin(key, value))]
        first, plain = self.length, bool(real.all())
        if plain and len(self._groups) == 1:
            (group,) = self._groups
            group.memory.make_room(query, key, value)
            self.length += key.shape[2]
            (output,) = _together([group.memory.take(query, key, value, scale)])
            return value[:, :, :0] if output is None else output
        if not plain:
            self._groups = [part for group in self._groups for part in group.by_padding(real)]
        every = torch.arange(key.shape[2], device=key.device)
        some = [every if plain else every[real[group.rows[0]]] for group in self._groups]
        given = []
        for group, inside in zip(self._groups, some, strict=True):
            own = [part[group.rows] if plain else part[group.rows][:, :, inside] for part in (key, value)]
            asked = None if query is None else query[group.rows] if plain else query[group.rows][:, :, inside]
            group.memory.make_room(asked, own[0], own[1])
            given.append((asked, own[0], own[1], scale))
        self.length += key.shape[2]
        if not plain:
            self._groups = [group.padded(real[group.rows[0]], first) for group in self._groups]
        takes = [
            group.memory.take(*tokens) if len(inside) else iter(())
            for group, tokens, inside in zip(self._groups, given, some, strict=True)
        ]
        heads, tokens = (key.shape[1], 0) if query is None else query.shape[1:3]
        output = value.new_zeros((key.shape[0], heads, tokens, value.shape[3]))
        for group, inside, found in zip(self._groups, some, _together(takes), strict=True):
            if found is not None:
                output[group.rows[:, None], :, inside] = found.transpose(1, 2)
        return output

    def select(self, index: Tensor) -> None:
        """Keep these sequences of the batch."""
        if not self._groups:
            return
        index = index.to(self._groups[0].rows.device)
        every = torch.arange(sum(len(group.rows) for group in self._groups), device=index.device)
        if torch.equal(index, every):  # as beams often stay where they are
            return
        found = [(group, (index[:, None] == group.rows).nonzero()) for group in self._groups]
        self._groups = [
            replace(group, rows=at[:, 0], memory=group.memory.select(at[:, 1])) for group, at in found if len(at)
        ]

    def check_crop(self, length: int) -> None:
        """`ValueError` where it is too late to forget what came from place `length` on, at most the present one."""
        for group in self._groups:
            if (reason := group.memory.refusal(group.count(length))) is not None:
                raise ValueError(
                    f"length: {reason}; got {length} after {self.length}. Save the stream before tokens that may be "
                    "taken back"
                )

    def crop(self, length: int) -> None:
        """Forget what came from place `length` on, which is not too late."""
        for number, group in enumerate(self._groups):
            group.memory.crop(group.count(length))
            gaps = tuple((start, min(stop, length)) for start, stop in group.gaps if start < length)
            self._groups[number] = replace(group, gaps=gaps)
        self.length = length

    def merge(self, other: Padded) -> None:
        """Go on as if the tokens of another stream of the same plan had come next."""
        own, found = self._groups, []
        if not own:
            every = [(group, torch.arange(len(group.rows), device=group.rows.device)) for group in other._groups]
            found = [replace(group, memory=group.memory.select(index)) for group, index in every]
        for group, after in ((a, b) for a in own for b in other._groups):
            mine, theirs = (group.rows[:, None] == after.rows).nonzero().unbind(1)
            if len(mine):
                memory = group.memory.select(mine)
                memory.merge(after.memory.select(theirs))
                gaps = tuple((start + self.length, stop + self.length) for start, stop in after.gaps)
                found.append(Group(group.rows[mine], _joined(group.gaps, gaps), memory))
        if other._groups:
            self._groups = found
        self.length += other.length

    def like(self) -> tuple[Tensor, ...]:
        """Keys and values (B, Hkv, none, D or Dv) of the kind that is held; nothing before the first."""
        if not self._groups:
            return ()
        batch = sum(len(group.rows) for group in self._groups)
        return tuple(part[:1, :, :0].expand(batch, -1, -1, -1) for part in self._groups[0].memory.like())

    def bytes(self) -> int:
        """Memory held."""
        return sum(group.memory.bytes() for group in self._groups)

    def tensors(self) -> dict[str, Tensor]:
        """What is to be written to a file, by name: nothing before the first token."""
        return {
            f"{number}.{name}": tensor
            for number, group in enumerate(self._groups)
            for name, tensor in ({"rows": group.rows} | group.memory.tensors()).items()
        }

    def facts(self) -> dict[str, Any]:
        """What else is to be written, as JSON knows it."""
        return {"groups": [{"gaps": group.gaps, "held": group.memory.facts()} for group in self._groups]}

    def restore(self, length: int, facts: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        """Hold what `facts` and `tensors` gave after `length` tokens; `ValueError` where that is no such memory."""
        left, groups = dict(tensors), []
        for number, told in enumerate(build(_Groups, facts).groups):
            root = f"{number}."
            mine = {name.removeprefix(root): left.pop(name) for name in tensors if name.startswith(root)}
            group = Group(_rows(mine.pop("rows")), _gaps(told.gaps, length), self._empty)
            memory = self._empty.restored(group.count(length), told.held, mine)
            if memory.like()[0].shape[0] != len(group.rows):
                raise ValueError(f"expected memory of {len(group.rows)} sequences, got {memory.like()[0].shape[0]}")
            groups.append(replace(group, memory=memory))
        kinds = {tuple((*part.shape[1::2], part.dtype) for part in group.memory.like()) for group in groups}
        if left or len(kinds) != 1:
            raise ValueError(f"expected groups of sequences of one kind, got {len(kinds)} and {sorted(left)}")
        rows = torch.cat([group.rows for group in groups])
        if not torch.equal(rows.sort().values, torch.arange(len(rows), device=rows.device)):
            raise ValueError("expected every sequence of the batch in one group, got others")
        self.length, self._groups = length, groups


def _together(takes: Sequence[Iterator[Tensor | Problem]]) -> list[Tensor | None]:
    """The outputs of all memories, None of those that give none; problems of a round are answered at once."""
    found: list[list[Tensor]] = [[] for _ in takes]
    left = [*enumerate(takes)]
    while left:
        came = [(number, take, next(take, None)) for number, take in left]
        left = [(number, take) for number, take, one in came if one is not None]
        problems = [one for _, _, one in came if isinstance(one, Problem)]
        answers = iter([dispatch.attend(one) for one in problems])
        for number, _, one in came:
            if one is not None:
                found[number].append(next(answers) if isinstance(one, Problem) else one)
    return [None if not own else own[0] if len(own) == 1 else torch.cat(own, 2) for own in found]


def _joined(before: Gaps, after: Gaps) -> Gaps:
    """Gaps followed by later ones."""
    if before and after and before[-1][1] == after[0][0]:
        return (*before[:-1], (before[-1][0], after[0][1]), *after[1:])
    return before + after


def _rows(rows: Tensor) -> Tensor:
    if rows.ndim != 1 or rows.dtype != torch.int64 or not len(rows):
        raise ValueError(f"expected rows (sequences,) of torch.int64, got {tuple(rows.shape)} of {rows.dtype}")
    return rows


def _gaps(told: list[list[int]], length: int) -> Gaps:
    edges = [place for gap in told for place in gap]
    if any(len(gap) != 2 for gap in told) or edges != sorted({*edges}) or not all(0 <= e <= length for e in edges):
        raise ValueError(f"expected padding at places that rise, of {length}, got {told}")
    return tuple((start, stop) for start, stop in told)
