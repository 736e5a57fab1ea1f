"""Where a cache leaves new keys, and the attention function finds whose they are.

By the identity of the key tensor, which both sides hold in their hands between the two calls.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from fewkeys.captures.capture import AttentionInputs


class Waiting(Protocol):
    """Whoever answers the attention calls of the keys it left here."""

    def attend(self, inputs: AttentionInputs) -> Tensor: ...


class Length(int):
    """A number of keys that are all new: what came before is remembered elsewhere, by its own rule."""


_waiting = WeakIdKeyDictionary()


def wait(key: Tensor, who: Waiting) -> None:
    """Let `who` answer the calls whose keys are `key`, for as long as somebody holds that tensor."""
    _waiting[key] = who


def waiting(key: Tensor) -> Waiting | None:
    """Who answers the call whose keys are `key`."""
    who: Waiting | None = _waiting.get(key) if _waiting.data else None
    return who
