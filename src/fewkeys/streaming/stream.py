"""The stream: append keys and values, attend with their queries, forget by plan.

    appended keys -> near (exact) -> sinks and heavy keys (exact) -> summary: means of everything else

What a query sees is what it sees under `attention(..., plan=plan, is_causal=True)`; what is kept depends on the plan
alone, not on the length.
"""

from __future__ import annotations

import os
from dataclasses import replace

import torch
from torch import Tensor

from fewkeys.core.validation import check_finite, check_real, check_tensor
from fewkeys.plan import Plan
from fewkeys.streaming import files
from fewkeys.streaming.memory import Memory
from fewkeys.streaming.parts import parts_of


def stream(plan: Plan, *, scale: float | None = None, generator: torch.Generator | None = None) -> Stream:
    """An empty stream that runs a causal plan, such as `fewkeys.budget(slots, is_causal=True)`.

    Args:
        plan: `RecentBlocks` or `Window`, with any of `Sinks`, `Leverage(count)`, `KeyNorm`, `RandomKeys` beside it, and
            `RunningMeans` or `Drop` for the rest.
        scale: factor on the scores; default 1 / sqrt(D).
        generator: source of randomness for `RandomKeys`; default: seed 0.

    Raises `TypeError` or `ValueError` for a plan that no stream can run, naming the part.
    """
    return Stream(plan, scale=scale, generator=generator)


class Stream:
    """Attention over tokens that arrive in pieces of any size, in memory that the plan fixes.

        stream = fewkeys.stream(fewkeys.budget(96, is_causal=True))
        stream.append(key, value)        # (B, Hkv, N, D), (B, Hkv, N, Dv)
        output = stream.attend(query)    # (B, Hq, N, D) -> (B, Hq, N, Dv)

    Whole, in pieces or token by token, the outputs are those of `fewkeys.attention` on the whole sequence with the same
    plan, up to rounding. Per token: O(slots (D + Dv)), and every `unit` tokens one update of the summary. Without
    gradient.
    """

    def __init__(self, plan: Plan, *, scale: float | None = None, generator: torch.Generator | None = None) -> None:
        self.plan, self.parts = plan, parts_of(plan)
        self.scale = None if scale is None else check_real("scale", scale)
        # Drawn from as keys come, so that a saved stream can go on with the same draws.
        self.generator = torch.Generator().manual_seed(0) if generator is None else generator
        self.length = 0
        """Tokens seen, padding included."""
        self._memory: Memory | None = None
        self._pending: tuple[Tensor, Tensor, Tensor] | None = None

    @torch.no_grad()
    def append(self, key: Tensor, value: Tensor, key_mask: Tensor | None = None) -> None:
        """Add N tokens: keys (B, Hkv, N, D), values (B, Hkv, N, Dv); `key_mask` (B, N) is False for padding.

        Tokens that were appended earlier and never attended from are taken in without queries.
        """
        key, value, real = self._check(key, value, key_mask)
        self._settle()
        self._pending = (key, value, real)
        self.length += key.shape[2]

    @torch.no_grad()
    def attend(self, query: Tensor) -> Tensor:
        """The outputs (B, Hq, Nq, Dv) of the queries (B, Hq, Nq, D) of the last Nq tokens of the last `append`."""
        query = check_tensor("query", query)
        if self._pending is None:
            raise ValueError("query: expected tokens that were appended and not yet attended from; append them first")
        key, value, real = self._pending
        self._check_query(query, key)
        check_finite(query=query)
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
        if self._memory is not None:
            self._memory = self._memory.each(lambda tensor: tensor[index])

    def crop(self, length: int) -> None:
        """Forget the tokens from position `length` on, as if they had never come.

        Possible back to the beginning of the current unit of positions, whose keys have moved no memory yet. Raises
        `ValueError` beyond.
        """
        self._settle()
        if length == self.length:
            return
        least = 0 if self._memory is None else self._memory.state.moved
        if not isinstance(length, int) or not least <= length <= self.length:
            raise ValueError(
                f"length: expected {least} to {self.length}: what came before is summarised by units of "
                f"{self.parts.unit} positions and cannot be undone; got {length}. Save the stream before tokens that "
                "may be taken back"
            )
        if self._memory is not None:
            self._memory.state = self._memory.state.crop(length)
        self.length = length

    @torch.no_grad()
    def merge(self, other: Stream) -> None:
        """Go on as if the tokens of `other`, a stream of the same plan, had come after these.

        `other` saw them without this past: its outputs are its own, and its memory becomes part of this one. Nothing is
        counted twice or lost. `self` must stand at a multiple of `parts.aligned` tokens, since blocks are of absolute
        positions. Raises `ValueError` for another plan or other shapes.
        """
        self._settle()
        other._settle()
        if self.plan != other.plan:
            raise ValueError(f"other: expected a stream of the plan {self.plan}, got one of {other.plan}")
        if self.length % self.parts.aligned:
            raise ValueError(
                f"other: expected this stream to stand at a multiple of {self.parts.aligned} tokens, got {self.length}"
            )
        if other._memory is None:
            return
        if self._memory is None:
            self._memory = other._memory.each(lambda tensor: tensor)
        else:
            self._memory.merge(other._memory)
        self.length += other.length

    @property
    def batch(self) -> int | None:
        """Sequences in the batch; None before the first token."""
        return self._like()[0].shape[0] if self._like() else None

    def memory(self) -> int:
        """Bytes that the stream holds."""
        return 0 if self._memory is None else self._memory.size()

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the stream to one safetensors file, whole or not at all; `Stream.load` goes on from it identically."""
        self._settle()
        memory = self._memory
        facts = {"plan": self.plan.to_dict(), "scale": self.scale, "length": self.length}
        if memory is None:
            files.write(path, facts, {})
            return
        tensors = memory.tensors()
        tensors["generator"] = self.generator.get_state()
        files.write(path, {**facts, "moved": memory.state.moved}, tensors)

    @classmethod
    def load(cls, path: str | os.PathLike[str], device: torch.device | str = "cpu") -> Stream:
        """The stream that `save` wrote, on `device`; `ValueError` names a damaged or foreign file."""
        facts, tensors = files.read(path, device)
        try:
            generator = torch.Generator()
            if tensors:
                generator.set_state(tensors.pop("generator").cpu())
            found = cls(Plan.from_dict(facts["plan"]), scale=facts["scale"], generator=generator)
            found.length = facts["length"]
            if tensors:
                near = (tensors["near.key"], tensors["near.value"])
                found._memory = Memory(found.plan, found.parts, *near, generator).with_tensors(tensors)
                found._memory.state = replace(found._memory.state, length=facts["length"], moved=facts["moved"])
        except (KeyError, TypeError) as error:
            raise ValueError(f"path: expected all that Stream.save writes, got {path} without {error}") from None
        return found

    def _settle(self) -> None:
        """Take in what was appended and never attended from."""
        if self._pending is not None:
            pending, self._pending = self._pending, None
            self._take(None, *pending)

    def _take(self, query: Tensor | None, key: Tensor, value: Tensor, real: Tensor) -> Tensor:
        if self._memory is None:
            self._memory = Memory(self.plan, self.parts, key, value, self.generator)
        memory, done, outputs = self._memory, 0, []
        scale = key.shape[-1] ** -0.5 if self.scale is None else self.scale
        while done < key.shape[2]:
            stop = min(key.shape[2], done + self.parts.unit - memory.state.length % self.parts.unit)
            asked = None if query is None else query[:, :, done:stop]
            output = memory.append(key[:, :, done:stop], value[:, :, done:stop], real[:, done:stop], asked, scale)
            if output is not None:
                outputs.append(output)
            done = stop
        return torch.cat(outputs, 2) if outputs else value[:, :, :0]

    def _check(self, key: object, value: object, key_mask: object) -> tuple[Tensor, Tensor, Tensor]:
        k, v = check_tensor("key", key), check_tensor("value", value)
        if v.shape[:3] != k.shape[:3] or v.dtype != k.dtype or v.device != k.device:
            raise ValueError(
                f"value: expected {tuple(k.shape[:3])} (batch, heads, tokens), {k.dtype} on {k.device} like key, got "
                f"{tuple(v.shape[:3])}, {v.dtype} on {v.device}"
            )
        for name, new, old in zip(("key", "value"), (k, v), self._like(), strict=False):
            wanted, came = (*old.shape[:2], old.shape[3]), (*new.shape[:2], new.shape[3])
            if wanted != came or new.dtype != old.dtype or new.device != old.device:
                raise ValueError(
                    f"{name}: expected (batch, heads, dim) = {wanted}, {old.dtype} on {old.device} like the tokens "
                    f"before, got {came}, {new.dtype} on {new.device}"
                )
        if key_mask is None:
            real = torch.ones((k.shape[0], k.shape[2]), dtype=torch.bool, device=k.device)
        elif (
            isinstance(key_mask, Tensor) and key_mask.dtype == torch.bool and key_mask.shape == (k.shape[0], k.shape[2])
        ):
            real = key_mask.to(k.device)
            k, v = (tensor.masked_fill(~real[:, None, :, None], 0.0) for tensor in (k, v))
        else:
            found = f"{key_mask.dtype} {tuple(key_mask.shape)}" if isinstance(key_mask, Tensor) else type(key_mask)
            raise ValueError(f"key_mask: expected a bool tensor {(k.shape[0], k.shape[2])}, got {found}")
        check_finite(key=k, value=v)
        return k, v, real

    def _like(self) -> tuple[Tensor, ...]:
        """Keys and values that came before, if any did."""
        if self._pending is not None:
            return self._pending[:2]
        return () if self._memory is None else (self._memory.state.near.key, self._memory.state.near.value)

    def _check_query(self, query: Tensor, key: Tensor) -> None:
        batch, heads, tokens, dim = key.shape
        shape = query.shape
        if shape[0] != batch or shape[1] % heads or shape[2] > tokens or shape[3] != dim or query.dtype != key.dtype:
            raise ValueError(
                f"query: expected ({batch}, a multiple of {heads}, at most {tokens}, {dim}) in {key.dtype} for the "
                f"tokens last appended, got {tuple(shape)} in {query.dtype}"
            )
