"""The streams of one layer, whose key heads may have plans of their own."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fewkeys.plan import Plan
from fewkeys.streaming.coded import Coded
from fewkeys.streaming.files import Facts
from fewkeys.streaming.rows import Held
from fewkeys.streaming.stream import Stream

AS_THEY_COME = Held()
DRAFT = 24
"""Tokens that a cache can always take back: what assisted and prompt-lookup decoding propose, and some more."""


class HeadStreams:
    """`Stream`s of the distinct plans of a layer, each over the key heads that have it.

    `plans`: one for all key heads, or one for each. Shapes and errors are those of `Stream`.
    """

    def __init__(self, plans: Sequence[Plan], how: Held = AS_THEY_COME) -> None:
        self._heads = len(plans)
        groups: dict[Plan, list[int]] = {}
        for head, plan in enumerate(plans):
            groups.setdefault(plan, []).append(head)
        self.how = how
        self.streams = [self._stream(plan) for plan in groups]
        self._of = [torch.tensor(heads, device="cpu") for heads in groups.values()]

    def append(self, key: Tensor, value: Tensor, key_mask: Tensor | None, scale: float) -> None:
        """As `Stream.append`."""
        if self._heads not in (1, key.shape[1]):
            raise ValueError(f"plan: expected one plan for each of {key.shape[1]} key heads, got {self._heads}")
        for stream, heads in zip(self.streams, self._of, strict=True):
            stream.scale = scale
            own = (key, value) if len(self.streams) == 1 else (key[:, heads], value[:, heads])
            stream.append(*own, key_mask)

    def attend(self, query: Tensor) -> Tensor:
        """As `Stream.attend`."""
        if len(self.streams) == 1:
            return self.streams[0].attend(query)
        grouped = query.unflatten(1, (self._heads, -1))
        parts = [
            stream.attend(grouped[:, heads].flatten(1, 2)).unflatten(1, (len(heads), -1))
            for stream, heads in zip(self.streams, self._of, strict=True)
        ]
        return torch.cat(parts, 1)[:, torch.cat(self._of).argsort()].flatten(1, 2)

    def _stream(self, plan: Plan) -> Stream:
        how = (self.how.dtype, self.how.folder) if Coded.suits(plan) else (None, None)
        return Stream(plan, leaves=how[0], folder=how[1], undo=DRAFT)

    @property
    def length(self) -> int:
        """Tokens seen."""
        return self.streams[0].length

    @property
    def batch(self) -> int | None:
        """Sequences in the batch; None before the first token."""
        return self.streams[0].batch

    def select(self, index: Tensor) -> None:
        """As `Stream.select`."""
        for stream in self.streams:
            stream.select(index)

    def crop(self, length: int) -> None:
        """As `Stream.crop`: of all heads, or of none."""
        self.check_crop(length)
        for stream in self.streams:
            stream.crop(length)

    def check_crop(self, length: int) -> None:
        """As `Stream.check_crop`."""
        for stream in self.streams:
            stream.check_crop(length)

    def memory(self) -> int:
        """Bytes held."""
        return sum(stream.memory() for stream in self.streams)

    def contents(self) -> list[tuple[dict[str, Any], dict[str, Tensor]] | None]:
        """What a file of each stream says and holds, None where it has not begun."""
        return [stream.contents() if stream.length else None for stream in self.streams]

    def restored(self, held: Sequence[tuple[Facts, dict[str, Tensor]] | None], device: Any) -> HeadStreams:
        """Streams of the same plans that hold what a file gave; `ValueError` for those of other plans."""
        found = copy.copy(self)
        found.streams = [
            self._stream(own.plan) if part is None else Stream.of(*part, device, own.folder, DRAFT)
            for own, part in zip(self.streams, held, strict=True)
        ]
        if [(own.plan, own.leaves) for own in found.streams] != [(own.plan, own.leaves) for own in self.streams]:
            raise ValueError("expected the plans of this cache, got others")
        return found
