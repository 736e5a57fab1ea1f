"""The stream: append keys and values, attend with their queries, remember what the plan may still ask for.

    Stream    what comes in and goes out: checks, tokens that wait for their queries, files
    Padded    which sequences go together, and where they are padded
    Memory    what is held between: `Summarised`, of a size that the plan fixes, or `Coded`, every key with its code

What a query sees is what it sees under `attention(..., plan=plan, is_causal=True)`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor

from fewkeys.core.precision import full_precision, lowered
from fewkeys.core.validation import check_real, check_tensor
from fewkeys.plan import Plan
from fewkeys.streaming import files
from fewkeys.streaming.checks import check_query, check_tokens
from fewkeys.streaming.coded import Coded
from fewkeys.streaming.padded import Padded
from fewkeys.streaming.rows import Held, LeafType
from fewkeys.streaming.summarised import Summarised


def stream(
    plan: Plan,
    *,
    scale: float | None = None,
    generator: torch.Generator | None = None,
    leaves: LeafType | None = None,
    folder: str | os.PathLike[str] | None = None,
) -> Stream:
    """An empty stream that runs a causal plan, such as `fewkeys.budget(slots, is_causal=True)`.

    Args:
        plan: `KeyScan` alone, with `BlockMeans` or `Drop`, whose stream holds every key; or, in memory of a fixed size,
            `RecentBlocks` or `Window`, with any of `Sinks`, `Leverage(count)`, `KeyNorm`, `RandomKeys` beside it, and
            `RunningMeans` or `Drop` for the rest.
        scale: factor on the scores; default 1 / sqrt(D).
        generator: source of randomness for `RandomKeys`; default: seed 0.
        leaves: how a `KeyScan` holds keys and values: "model", the default, as they come, or "int8" with a scale for
            each key and each value.
        folder: where a `KeyScan` writes them, to files without a name that go with the stream, whatever ends it;
            default: nowhere, they are in memory. A copy, every reordering, and who goes on after a fork write files of
            their own.

    Raises `TypeError` or `ValueError` for a plan that no stream can run, naming the part.
    """
    return Stream(plan, scale=scale, generator=generator, leaves=leaves, folder=folder)


class Stream:
    """Attention over tokens that arrive in pieces of any size.

        stream = fewkeys.stream(fewkeys.budget(96, is_causal=True))
        stream.append(key, value)        # (B, Hkv, N, D), (B, Hkv, N, Dv)
        output = stream.attend(query)    # (B, Hq, N, D) -> (B, Hq, N, Dv)

    Whole, in pieces or token by token, the outputs are those of `fewkeys.attention` on the whole sequence with the same
    plan, up to rounding. Padding is as if it had never come; sequences
    that are padded unlike are answered one after the other. Per token O(slots (D + Dv)), whatever the length, and
    besides, by plan:

        RecentBlocks, Window, ...   memory of a fixed size; every `unit` tokens one update of the summary
        KeyScan                     memory O(n (D + Dv)); a token codes itself, O(D^2), and scans n D / 4 bytes

    `undo`: tokens that `crop` can take back at any time, for the memory of one or two more units. Where a file finds no
    room, `attend` raises `OSError`, and the stream is as before the tokens. Without gradient.
    """

    def __init__(
        self,
        plan: Plan,
        *,
        scale: float | None = None,
        generator: torch.Generator | None = None,
        leaves: LeafType | None = None,
        folder: str | os.PathLike[str] | None = None,
        undo: int = 0,
    ) -> None:
        self.plan = plan
        self.leaves, self.folder = leaves, folder
        self.scale = None if scale is None else check_real("scale", scale)
        # Drawn from as keys come, so that a saved stream can go on with the same draws.
        self.generator = torch.Generator("cpu").manual_seed(0) if generator is None else generator
        self.length = 0
        """Tokens seen, padding included."""
        how = Held.of(leaves, folder, "model")
        if not Coded.suits(plan) and how != Held():
            raise ValueError(
                f"{'leaves' if folder is None else 'folder'}: expected None for a plan without KeyScan, whose memory "
                f"does not grow, got {folder or leaves}"
            )
        self._held = Padded(Coded(plan, how) if Coded.suits(plan) else Summarised(plan, self.generator, undo))
        self._pending: tuple[Tensor, Tensor, Tensor] | None = None

    @torch.no_grad()
    def append(self, key: Tensor, value: Tensor, key_mask: Tensor | None = None) -> None:
        """Add N tokens: keys (B, Hkv, N, D), values (B, Hkv, N, Dv); `key_mask` (B, N) is False for padding.

        Tokens that were appended earlier and never attended from are taken in without queries.
        """
        key, value, real = check_tokens(key, value, key_mask, self._like())
        self._settle()
        self._pending = (key, value, real)
        self.length += key.shape[2]

    @torch.no_grad()
    def attend(self, query: Tensor) -> Tensor:
        """The outputs (B, Hq, Nq, Dv) of the queries (B, Hq, Nq, D) of the last Nq tokens of the last `append`."""
        query = lowered(check_tensor("query", query))
        if self._pending is None:
            raise ValueError("query: expected tokens that were appended and not yet attended from; append them first")
        key, value, real = self._pending
        check_query(query, key)
        self._pending = None
        first = key.shape[2] - query.shape[2]
        if first:
            self._take(None, key[:, :, :first], value[:, :, :first], real[:, :first])
        return self._take(query, key[:, :, first:], value[:, :, first:], real[:, first:])

    def select(self, index: Tensor) -> None:
        """Keep the sequences `index` (M,) of the batch, in that order; an index may come several times."""
        if self._pending is not None:
            key, value, real = self._pending
            self._pending = (key[index], value[index], real[index])
        self._held.select(index)

    def crop(self, length: int) -> None:
        """Forget the tokens from position `length` on, as if they had never come.

        Possible over the last `undo` tokens, and back to the beginning of the current unit of real tokens, whose keys
        have moved no memory yet; a stream of a `KeyScan` goes back to any token. Raises `ValueError` beyond.
        """
        self.check_crop(length)
        if length < self.length:
            self._held.crop(length)
            self.length = length

    def check_crop(self, length: int) -> None:
        """Raise what `crop` would raise, and forget nothing."""
        self._settle()
        if not isinstance(length, int) or not 0 <= length <= self.length:
            raise ValueError(f"length: expected 0 to {self.length}, the tokens seen, got {length}")
        self._held.check_crop(length)

    @full_precision()
    @torch.no_grad()
    def merge(self, other: Stream) -> None:
        """Go on as if the tokens of `other`, a stream of the same plan, had come after these.

        `other` saw them without this past: its outputs are its own, and its memory becomes part of this one. Nothing is
        counted twice or lost. Every sequence must stand between two blocks of real tokens, since blocks are absolute.
        Raises `ValueError` for another plan or other shapes.
        """
        self._settle()
        other._settle()
        if self.plan != other.plan:
            raise ValueError(f"other: expected a stream of the plan {self.plan}, got one of {other.plan}")
        self._held.merge(other._held)
        self.length += other.length

    @property
    def batch(self) -> int | None:
        """Sequences in the batch; None before the first token."""
        return self._like()[0].shape[0] if self._like() else None

    def memory(self) -> int:
        """Bytes that the stream holds."""
        return self._held.bytes()

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the stream to one safetensors file, whole or not at all; `Stream.load` goes on from it identically."""
        files.write(path, *self.contents())

    @classmethod
    def load(
        cls,
        path: str | os.PathLike[str],
        device: torch.device | str = "cpu",
        folder: str | os.PathLike[str] | None = None,
    ) -> Stream:
        """The stream that `save` wrote, on `device`, its leaves in `folder`; `ValueError` names a damaged or foreign
        file. Everything in it is checked before it is used.
        """
        try:
            return cls.of(*files.read(path), device, folder)
        except files.FAULTS as error:
            raise ValueError(
                f"path: expected a file that Stream.save wrote, got {path} ({error}); save again"
            ) from None

    def contents(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """What a file of the stream says and holds."""
        self._settle()
        facts = {"plan": self.plan.to_dict(), "scale": self.scale, "leaves": self.leaves, "length": self.length}
        tensors = self._held.tensors()
        facts["held"] = self._held.facts() if tensors else {}
        return facts, tensors | {"generator": self.generator.get_state()} if tensors else {}

    @classmethod
    def of(
        cls,
        facts: files.Facts,
        tensors: Mapping[str, Tensor],
        device: torch.device | str = "cpu",
        folder: str | os.PathLike[str] | None = None,
        undo: int = 0,
    ) -> Stream:
        """The stream of such contents; one of `files.FAULTS` where they are not those of a stream."""
        generator = torch.Generator("cpu")
        plan, leaves = Plan.from_dict(facts.plan), cast("LeafType | None", facts.leaves)
        found = cls(plan, scale=facts.scale, generator=generator, leaves=leaves, folder=folder, undo=undo)
        found.length = facts.length
        if tensors:
            generator.set_state(tensors["generator"])
            held = {name: tensor.to(device) for name, tensor in tensors.items() if name != "generator"}
            found._held.restore(facts.length, facts.held, held)
        elif facts.length or facts.held:
            raise ValueError(f"expected the memory of {facts.length} tokens, got none")
        return found

    def _settle(self) -> None:
        """Take in what was appended and never attended from."""
        if self._pending is not None:
            pending, self._pending = self._pending, None
            self._take(None, *pending)

    @full_precision()
    @torch.no_grad()
    def _take(self, query: Tensor | None, key: Tensor, value: Tensor, real: Tensor) -> Tensor:
        try:
            scale = key.shape[-1] ** -0.5 if self.scale is None else self.scale
            return self._held.take(query, key, value, real, scale)
        except OSError:
            self.length = self._held.length
            raise

    def _like(self) -> tuple[Tensor, ...]:
        """Keys and values that came before, if any did."""
        return self._held.like() if self._pending is None else self._pending[:2]
