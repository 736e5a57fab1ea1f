"""Streams: append keys and values, attend with their queries, and keep what later queries may need."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor

from fewkeys.core.extent import needs_rescaling
from fewkeys.core.precision import full_precision, lowered, widened, working_dtype
from fewkeys.core.tensor_files import Form, check
from fewkeys.core.validation import check_real, check_tensor
from fewkeys.memory import files
from fewkeys.memory.checks import Kind, NewTokens, check_query, check_tokens
from fewkeys.memory.coded import Coded
from fewkeys.memory.constant import Constant, parts_of
from fewkeys.memory.groups import Group
from fewkeys.memory.rows import LeafType, Rules, check_leaves
from fewkeys.plan import Plan
from fewkeys.rest import BlockMeans, Drop


def stream(plan: Plan, *, scale: float | None = None, leaves: LeafType | None = None) -> Stream:
    """An empty stream that runs a causal plan, such as `fewkeys.budget(slots, is_causal=True)`.

    Args:
        plan: `KeyScan` alone, with `BlockMeans` or `Drop`: the stream keeps every key. Or `RecentBlocks` or `Window`,
            with or without `Sinks`, and with `RunningMeans` or `Drop`: its memory has a fixed size.
        scale: factor on the scores; default 1 / sqrt(D).
        leaves: how a stream of a `KeyScan` keeps keys and values: "model", the default, as they come (float16 on a CPU
            in float32), or "int8", with a scale for each key and each value.

    Raises `TypeError` or `ValueError` for a plan that no stream can run, naming the part.
    """
    return Stream(plan, scale=scale, leaves=leaves)


class Stream:
    """Attention over tokens that come in pieces of any size.

        stream = fewkeys.stream(fewkeys.budget(96, is_causal=True))
        stream.append(key, value)        # (B, Hkv, N, D), (B, Hkv, N, Dv)
        output = stream.attend(query)    # (B, Hq, N, D) -> (B, Hq, N, Dv)

    With `plan.never_exact()` the outputs are, up to rounding, those of `fewkeys.attention` on the whole sequence; else
    `attention` may answer a whole call exactly, and a stream of a `KeyScan` its first tokens. Sequences with different
    padding are computed in turn. A token costs O(slots (D + Dv)) at any length, and in addition:

        RecentBlocks, Window, ...   memory of a fixed size; one update of the summary for each unit of tokens
        KeyScan                     memory O(n (D + Dv)); O(D log D) for the code of a key, and a scan of n D / 4 bytes

    A unit is a recent block or, without recent blocks, 32 tokens. `undo`: the number of latest tokens that `crop` can
    always remove, for the memory of one or two more units. No gradients.
    """

    def __init__(
        self,
        plan: Plan | Sequence[Plan],
        *,
        scale: float | None = None,
        leaves: LeafType | None = None,
        undo: int = 0,
    ) -> None:
        self.plan, self.leaves = plan, leaves
        self.scale = None if scale is None else check_real("scale", scale)
        self._plans = tuple(plan) if isinstance(plan, Sequence) else (plan,)
        for head_plan in self._plans:
            _memory_class(head_plan)
        check_leaves(leaves, self._plans)
        self._heads: dict[Rules, list[int]] = {}
        """The key heads of each distinct plan; one plan serves all heads."""
        for head, head_plan in enumerate(self._plans):
            self._heads.setdefault(Rules(head_plan, leaves or "model", undo), []).append(head)
        self._groups: list[Group] = []
        self._kind: Kind | None = None
        self._query_heads: int | None = None
        self._largest = [0.0, 0.0, 0.0]
        """The largest magnitudes of queries, keys and values so far."""
        self._processed = 0
        self._real: Tensor | None = None
        """(B, P): which of the first P tokens are real; all later ones are."""
        self._pending: NewTokens | None = None

    @property
    def length(self) -> int:
        """The number of tokens so far, with padding."""
        return self._processed + (0 if self._pending is None else self._pending.key.shape[2])

    @property
    def batch(self) -> int | None:
        """Sequences in the batch; None before the first token."""
        return None if self._kind is None else self._kind.batch

    @property
    def is_padded(self) -> bool:
        """Whether any token so far may be padding."""
        return self._real is not None or (self._pending is not None and self._pending.real is not None)

    def append(self, key: Tensor, value: Tensor, key_mask: Tensor | None = None) -> None:
        """Add N tokens: keys (B, Hkv, N, D), values (B, Hkv, N, Dv); `key_mask` (B, N) is False for padding.

        Tokens of an earlier `append` without an `attend` are added without queries.
        """
        tokens = check_tokens(key, value, key_mask, self._kind)
        kind, plans = Kind.of(tokens.key, tokens.value), len(self._plans)
        if plans not in (1, kind.heads):
            raise ValueError(f"plan: expected one plan for each of {kind.heads} key heads, got {plans}")
        self._flush_pending()
        self._pending, self._kind = tokens, kind

    def attend(self, query: Tensor) -> Tensor:
        """The outputs (B, Hq, Nq, Dv) of the queries (B, Hq, Nq, D) of the last Nq tokens of the last `append`."""
        query = lowered(check_tensor("query", query))
        query, dtype = widened(query), query.dtype
        if self._pending is None:
            raise ValueError("query: expected tokens that were appended and not yet attended from; append them first")
        tokens = self._pending
        largest = check_query(query, tokens.key, self._query_heads)
        self._pending = None
        first = tokens.key.shape[2] - query.shape[2]
        with self._undone_by_errors():
            self._query_heads = query.shape[1]
            if first:
                self._extend(None, 0.0, tokens.select(slice(None), slice(0, first)))
                tokens = tokens.select(slice(None), slice(first, None))
            return cast("Tensor", self._extend(query, largest, tokens)).to(dtype)

    def answer(self, query: Tensor, key: Tensor, value: Tensor, key_mask: Tensor | None = None) -> Tensor:
        """`append` N tokens and `attend` from their N queries (B, Hq, N, D): the outputs (B, Hq, N, Dv).

        Single tokens take less time than by the two calls. An error adds no token.
        """
        memory = self._groups[0].memory if len(self._groups) == 1 else None
        if key_mask is None and self._pending is None and isinstance(memory, Coded):
            q, k, v = (widened(rows) if isinstance(rows, Tensor) else rows for rows in (query, key, value))
            output = memory.answer(q, k, v, self._scale)
            if output is not None:
                self._processed += 1
                return output.to(query.dtype)
        with self._undone_by_errors():
            self.append(key, value, key_mask)
            return self.attend(query)

    def key_mask(self) -> Tensor:
        """The `key_mask` (B, N) of all tokens so far."""
        batch, device = (0, None) if self._kind is None else (self._kind.batch, self._kind.device)
        real = torch.ones(batch, self.length, dtype=torch.bool, device=device)
        if self._real is not None:
            real[:, : self._real.shape[1]] = self._real
        if self._pending is not None and self._pending.real is not None:
            real[:, self._processed :] = self._pending.real
        return real

    def select(self, index: Tensor) -> None:
        """Keep the sequences `index` (M,) of the batch in this order; they may repeat.

        As in torch, a negative index counts from the end, and booleans are a mask.
        """
        if self._kind is None:
            return
        index = _chosen(index, self._kind.batch)
        if index.tolist() == [*range(self._kind.batch)]:  # beam search often keeps the order
            return
        index = index.to(self._kind.device)
        pending = None if self._pending is None else self._pending.select(index, slice(None))
        groups = [part for group in self._groups if (part := group.select(index)) is not None]
        real, kind = None if self._real is None else self._real[index], self._kind._replace(batch=len(index))
        self._groups, self._real, self._pending, self._kind = groups, real, pending, kind

    def crop(self, length: int) -> None:
        """Remove the tokens from position `length` on: in a stream of a `KeyScan` any number, else all, or the last
        `undo` and those of the current unit. `ValueError` for others.
        """
        self.check_crop(length)
        if length < self.length:
            with self._undone_by_errors():
                left = [(group, self._tokens(group, length)) for group in self._groups]
                self._groups = [
                    replace(group, memory=group.memory.crop(count)) if count else self._empty(group.plan, group.rows)
                    for group, count in left
                ]
                self._real = None if self._real is None or self._real[:, :length].all() else self._real[:, :length]
                self._processed = length

    def check_crop(self, length: int, name: str = "length") -> None:
        """Raise what `crop` would raise. `name`: of the argument in the message."""
        if not isinstance(length, int) or not 0 <= length <= self.length:
            raise ValueError(f"{name}: expected 0 to {self.length}, the tokens seen, got {length}")
        if length < self.length:
            self._flush_pending()
        for group in self._groups:
            if 0 < self._tokens(group, length) < group.memory.fewest:
                raise ValueError(
                    f"{name}: expected at least {group.memory.fewest} real tokens to stay, since earlier ones are "
                    f"summarised, got {length} after {self.length}; save the stream before tokens that may be removed"
                )

    def memory(self) -> int:
        """The bytes of memory in use."""
        return sum(group.memory.bytes() for group in self._groups)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the stream to one safetensors file, whole or not at all. `Stream.load` restores it exactly."""
        files.write(path, "stream", [self.contents()])

    @classmethod
    def load(cls, path: str | os.PathLike[str], device: torch.device | str = "cpu") -> Stream:
        """The stream that `save` wrote. `ValueError` for a damaged file or another kind of file."""
        try:
            ((facts, tensors),) = files.read(path, "stream")
            plans = [Plan.from_dict(plan) for plan in facts.plans]
            loaded = cls(plans[0] if len(plans) == 1 else plans, scale=facts.scale, leaves=facts.leaves)
            return loaded.restore(facts, tensors, device)
        except files.FAULTS as error:
            raise ValueError(
                f"path: expected a file that Stream.save wrote, got {path} ({error}); save again"
            ) from None

    def contents(self) -> files.Contents:
        """What `save` writes, until the stream changes. In the file, tokens that wait for their queries are without."""
        with self._undone_by_errors(always=True):
            self._flush_pending()
            tensors = {} if self._real is None else {"real": self._real}
            for number, group in enumerate(self._groups):
                tensors |= {f"{number}.rows": group.rows} | group.memory.tensors(str(number))
            facts = {
                "plans": [plan.to_dict() for plan in self._plans],
                "scale": self.scale,
                "leaves": self.leaves,
                "length": self._processed,
                "sizes": None if self._kind is None else self._kind[:4],
                "dtype": None if self._kind is None else str(self._kind.dtype).removeprefix("torch."),
                "largest": self._largest,
                "groups": [group.plan for group in self._groups],
            }
            return facts, tensors

    def restore(self, facts: files.Facts, tensors: Mapping[str, Tensor], device: Any) -> Stream:
        """This empty stream with the contents of a file; one of `files.FAULTS` unless they fit its plans."""
        saved = [Plan.from_dict(plan) for plan in facts.plans]
        if saved != [*self._plans] or facts.leaves != self.leaves:
            show = str if _named(self._plans, self.leaves, str) != _named(saved, facts.leaves, str) else repr
            raise ValueError(
                f"expected {_named(self._plans, self.leaves, show)}, got {_named(saved, facts.leaves, show)}; give the "
                "plan and leaves under which the file was saved"
            )
        device = torch.empty(0, device=device).device
        left = {name: tensor.to(device) for name, tensor in tensors.items()}
        self._processed, self._largest, self._real = facts.length, facts.largest, left.pop("real", None)
        if facts.sizes and facts.dtype:
            self._kind = Kind(*facts.sizes, getattr(torch, facts.dtype), device)
        if self._real is not None:
            check({"real": self._real}, {"real": Form((self.batch, None), torch.bool)})
        for number, plan in enumerate(facts.groups):
            of_group = files.taken(left, f"{number}.")
            rows = of_group.pop("rows")
            check({"rows": rows}, {"rows": Form((None,), torch.int64)})
            group = self._empty(plan, rows)
            memory = group.memory.filled(self._tokens(group, facts.length), of_group)
            self._groups.append(replace(group, memory=memory))
        places = sorted((group.plan, row) for group in self._groups for row in group.rows.tolist())
        if left or places != [(plan, row) for plan in range(len(self._heads)) for row in range(self.batch or 0)]:
            raise ValueError(f"expected every sequence in one group of each plan, got others, {sorted(left)}")
        return self

    def _flush_pending(self) -> None:
        if self._pending is not None:
            with self._undone_by_errors():
                tokens, self._pending = self._pending, None
                self._extend(None, 0.0, tokens)

    @contextmanager
    def _undone_by_errors(self, always: bool = False) -> Iterator[None]:
        """Errors and interrupts inside leave the stream as it was; with `always`, everything does."""
        before = dict(vars(self))
        counts = [(buffer, buffer.count) for group in self._groups for buffer in group.memory.buffers]
        is_done = False
        try:
            yield
            is_done = not always
        finally:
            if not is_done:
                vars(self).update(before)
                for buffer, count in counts:
                    buffer.count = count

    @property
    def _scale(self) -> float:
        return cast("Kind", self._kind).dim ** -0.5 if self.scale is None else self.scale

    def _tokens(self, group: Group, length: int) -> int:
        """How many of the first `length` tokens are real in the group's sequences."""
        return length if self._real is None else length - int((~self._real[group.rows[0], :length]).sum())

    def _empty(self, number: int, rows: Tensor) -> Group:
        """The group of the sequences `rows` under plan `number`, without tokens."""
        (rules, heads), kind = [*self._heads.items()][number], cast("Kind", self._kind)
        heads = heads if len(self._plans) > 1 else [*range(kind.heads)]
        memory = _memory_class(rules.plan).begin(rules, kind._replace(batch=len(rows), heads=len(heads)))
        return Group(number, torch.tensor(heads, device=kind.device), rows, memory)

    @full_precision()
    @torch.no_grad()
    def _extend(self, query: Tensor | None, largest: float, new: NewTokens) -> Tensor | None:
        """Add tokens to all memories; the outputs of their queries, if any."""
        key, value, real, of_tokens = new
        groups = self._groups
        if not groups:
            groups = [self._empty(n, torch.arange(len(key), device=key.device)) for n in range(len(self._heads))]
        groups = [part for group in groups for part in ([group] if real is None else group.by_padding(real))]
        scale, self._largest = self._scale, [*map(max, self._largest, (largest, *of_tokens))]
        is_large = needs_rescaling(self._largest, scale, key.shape[3], working_dtype(key.dtype))
        is_alone = len(groups) == 1 and real is None
        ratio = 1 if query is None else query.shape[1] // key.shape[1]
        output = None if query is None or is_alone else value.new_zeros((*query.shape[:3], value.shape[3]))
        for number, group in enumerate(groups):
            at, of_query = (..., ...) if is_alone else group.places(key, real, ratio)
            rows = None if query is None else query[of_query], key[at], value[at]
            if not rows[1].shape[2]:
                continue
            memory, part = group.memory.extend(*rows, scale, is_large)
            if is_alone:
                output = part
            elif output is not None and part is not None:
                output[of_query] = part
            groups[number] = replace(group, memory=memory)
        if real is not None:
            self._real = torch.cat([self.key_mask(), real], 1)
        self._groups, self._processed = groups, self._processed + key.shape[2]
        return output


def _chosen(index: object, batch: int) -> Tensor:
    """The numbers (M,) of the chosen sequences, on the CPU, where errors of torch are harmless."""
    with suppress(IndexError, RuntimeError, TypeError, ValueError):
        chosen = torch.arange(batch, device="cpu")[torch.as_tensor(index, device="cpu")]
        if chosen.ndim == 1 and len(chosen):
            return chosen
    raise ValueError(f"index: expected numbers of some of {batch} sequences, or a mask of them, got {index}")


def _named(plans: Sequence[Plan], leaves: str | None, show: Callable[[Plan], str]) -> str:
    """The plans and the form of stored keys, in words."""
    form = f" with leaves={leaves!r}" if leaves else ""
    return f"the plan{'' if len(plans) == 1 else 's of key heads'} {', '.join(map(show, plans))}{form}"


def _memory_class(plan: Plan) -> type[Coded | Constant]:
    """The memory of a plan. `ValueError` or `TypeError` for a plan that no stream supports."""
    if not isinstance(plan, Plan) or not plan.scanned:
        parts_of(plan)
        return Constant
    if len(plan.parts) != 1:
        raise ValueError(f"plan: a stream keeps KeyScan alone, without rules beside it, got {plan.keep}")
    if not isinstance(plan.rest, BlockMeans | Drop):
        raise ValueError(
            f"plan: a stream of a KeyScan remembers the rest as BlockMeans(count) or drops it, got {plan.rest}; "
            "use budget(slots, is_causal=True)"
        )
    return Coded
