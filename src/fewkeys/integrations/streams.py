"""Where a cache leaves new keys, and the attention function finds whose they are.

By the identity of the key tensor, which both sides hold in their hands between the two calls.
"""

from __future__ import annotations

from typing import Protocol
from weakref import WeakValueDictionary

from torch import Tensor

from fewkeys.captures.capture import AttentionInputs


class Waiting(Protocol):
    """Whoever answers the attention call of the keys it left here."""

    def attend(self, inputs: AttentionInputs) -> Tensor: ...


class Length(int):
    """A number of keys that are all new: what came before is remembered elsewhere, by its own rule."""


_waiting: WeakValueDictionary[int, Waiting] = WeakValueDictionary()


def wait(key: Tensor, who: Waiting) -> None:
    """Let `who` answer the call whose keys are `key`; it keeps the tensor alive until then."""
    _waiting[id(key)] = who


def waits(key: Tensor) -> bool:
    """Whether somebody answers the call whose keys are `key`."""
    return id(key) in _waiting


def take(key: Tensor) -> Waiting | None:
    """Who answers the call whose keys are `key`, once."""
    return _waiting.pop(id(key), None)
