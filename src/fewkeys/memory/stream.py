"""The stream: append keys and values, attend with their queries, remember what the plan may still ask for.

    Stream    what comes in and goes out: checks, tokens that wait for their queries, groups, files
    Memory    what is held of a group: `Constant`, of a size that the plan fixes, or `Coded`, every key with its code

What a query sees is what it sees under `attention(..., plan=plan, is_causal=True)`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from fewkeys.core.extent import needs_rescaling
from fewkeys.core.precision import full_precision, lowered, working_dtype
from fewkeys.core.validation import check_real, check_tensor
from fewkeys.memory import files
from fewkeys.memory.base import Held, LeafType, Memory, Rules
from fewkeys.memory.checks import Came, Kind, check_query, check_tokens
from fewkeys.memory.coded import Coded
from fewkeys.memory.constant import Constant
from fewkeys.memory.groups import Group, checked_gaps, checked_rows, real_tokens
from fewkeys.plan import Plan


def stream(
    plan: Plan,
    *,
    scale: float | None = None,
    leaves: LeafType | None = None,
) -> Stream:
    """An empty stream that runs a causal plan, such as `fewkeys.budget(slots, is_causal=True)`.

    Args:
        plan: `KeyScan` alone, with `BlockMeans` or `Drop`, whose stream holds every key; or, in memory of a fixed size,
            `RecentBlocks` or `Window`, with `Sinks` beside it or without, and `RunningMeans` or `Drop` for the rest.
        scale: factor on the scores; default 1 / sqrt(D).
        leaves: how a `KeyScan` holds keys and values: "model", the default, as they come, or "int8" with a scale for
            each key and each value.

    Raises `TypeError` or `ValueError` for a plan that no stream can run, naming the part.
    """
    return Stream(plan, scale=scale, leaves=leaves)


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

    `undo`: tokens that `crop` can take back at any time, for the memory of one or two more units. Without gradient.
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
        plans = tuple(plan) if isinstance(plan, Sequence) else (plan,)
        self._plans: dict[Plan, list[int]] = {}
        """The distinct plans and the key heads of each; all heads where one plan was given."""
        for head, one in enumerate(plans):
            _kind_of(one).check(one)
            self._plans.setdefault(one, []).append(head)
        self._by_head = len(plans) if len(plans) > 1 else 0
        """Key heads, where each was given a plan; else 0."""
        how = Held(leaves or "model")
        if how != Held() and not any(one.scanned for one in plans):
            raise ValueError(f"leaves: expected None for a plan without KeyScan, whose memory is fixed, got {leaves}")
        self._rules = [Rules(one, how, undo) for one in self._plans]
        self._groups: list[Group] = []
        self._kind: Kind | None = None
        self._taken = 0
        self._pending: Came | None = None

    @property
    def length(self) -> int:
        """Tokens seen, padding included."""
        return self._taken + (0 if self._pending is None else self._pending.key.shape[2])

    @property
    def batch(self) -> int | None:
        """Sequences in the batch; None before the first token."""
        kind = self._kind if self._pending is None else self._pending.kind
        return None if kind is None else kind.batch

    def append(self, key: Tensor, value: Tensor, key_mask: Tensor | None = None) -> None:
        """Add N tokens: keys (B, Hkv, N, D), values (B, Hkv, N, Dv); `key_mask` (B, N) is False for padding.

        Tokens that were appended earlier and never attended from are taken in without queries.
        """
        came = check_tokens(key, value, key_mask, self._kind if self._pending is None else self._pending.kind)
        if self._by_head not in (0, came.key.shape[1]):
            raise ValueError(f"plan: expected one plan for each of {came.key.shape[1]} key heads, got {self._by_head}")
        self._settle()
        self._pending = came

    def attend(self, query: Tensor) -> Tensor:
        """The outputs (B, Hq, Nq, Dv) of the queries (B, Hq, Nq, D) of the last Nq tokens of the last `append`."""
        query = lowered(check_tensor("query", query))
        if self._pending is None:
            raise ValueError("query: expected tokens that were appended and not yet attended from; append them first")
        came = self._pending
        largest = check_query(query, came.key)
        self._pending = None
        first = came.key.shape[2] - query.shape[2]
        if first:
            self._take(None, 0.0, _part(came, slice(0, first)))
            came = _part(came, slice(first, None))
        return cast("Tensor", self._take(query, largest, came))

    def select(self, index: Tensor) -> None:
        """Keep the sequences `index` (M,) of the batch, in that order; an index may come several times."""
        if self._pending is not None:
            key, value, real, largest = self._pending
            self._pending = Came(key[index], value[index], None if real is None else real[index], largest)
        if self._kind is None:
            return
        index = index.to(self._groups[0].rows.device)
        if torch.equal(index, torch.arange(self._kind.batch, device=index.device)):  # as beams often stay
            return
        groups = (group.select(index) for group in self._groups)
        self._groups = [group for group in groups if group is not None]
        self._kind = self._kind._replace(batch=len(index))

    def crop(self, length: int) -> None:
        """Forget the tokens from position `length` on, as if they had never come.

        Possible over the last `undo` tokens, and back to the beginning of the current unit of real tokens, whose keys
        have moved no memory yet; a stream of a `KeyScan` goes back to any token. Raises `ValueError` beyond.
        """
        self.check_crop(length)
        if length < self.length:
            self._groups = [group.crop(length) for group in self._groups]
            self._taken = length

    def check_crop(self, length: int) -> None:
        """Raise what `crop` would raise, and forget nothing."""
        self._settle()
        if not isinstance(length, int) or not 0 <= length <= self.length:
            raise ValueError(f"length: expected 0 to {self.length}, the tokens seen, got {length}")
        for group in self._groups:
            if (reason := group.memory.refusal(group.count(length))) is not None:
                raise ValueError(
                    f"length: {reason}; got {length} after {self.length}. Save the stream before tokens that may be "
                    "taken back"
                )

    @full_precision()
    @torch.no_grad()
    def merge(self, other: Stream) -> None:
        """Go on as if the tokens of `other`, a stream of the same plan, had come after these.

        `other` saw them without this past: its outputs are its own, and its keys become part of this memory. Raises
        `ValueError` for memory of a fixed size, for another plan or other shapes.
        """
        self._settle()
        other._settle()
        if self.plan != other.plan:
            raise ValueError(f"other: expected a stream of the plan {self.plan}, got one of {other.plan}")
        if other._kind is None:
            return
        if self._kind is None:
            self._begin(other._kind)
        if self._kind != other._kind:
            raise ValueError(f"other: expected tokens like {self._kind}, got {other._kind}")
        pairs = ((a, b) for a in self._groups for b in other._groups if a.plan == b.plan)
        merged = [a.merge(b, self.length) for a, b in pairs]
        self._groups = [group for group in merged if group is not None]
        self._taken += other.length

    def memory(self) -> int:
        """Bytes that the stream holds in memory."""
        return sum(group.memory.bytes() for group in self._groups)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the stream to one safetensors file, whole or not at all; `Stream.load` goes on from it identically."""
        files.write(path, "stream", [self.contents()])

    @classmethod
    def load(cls, path: str | os.PathLike[str], device: torch.device | str = "cpu") -> Stream:
        """The stream that `save` wrote, on `device`; `ValueError` names a damaged or foreign file. Everything in it is
        checked before it is used.
        """
        if not Path(path).is_file():
            raise FileNotFoundError(f"path: expected a file that Stream.save wrote, got {path}, which is no file")
        try:
            ((facts, tensors),) = files.read(path, "stream")
            plans = [Plan.from_dict(plan) for plan in facts.plans]
            leaves = cast("LeafType | None", facts.leaves)
            loaded = cls(plans[0] if len(plans) == 1 else plans, scale=facts.scale, leaves=leaves)
            return loaded.restore(facts, tensors, device)
        except files.FAULTS as error:
            raise ValueError(
                f"path: expected a file that Stream.save wrote, got {path} ({error}); save again"
            ) from None

    def contents(self) -> files.Contents:
        """What a file of the stream says and holds."""
        self._settle()
        plans = [self.plan] if isinstance(self.plan, Plan) else self.plan
        facts = {"plans": [plan.to_dict() for plan in plans], "scale": self.scale, "leaves": self.leaves}
        groups = [{"plan": one.plan, "gaps": one.gaps, "held": one.memory.facts()} for one in self._groups]
        tensors: dict[str, Tensor] = {}
        for number, group in enumerate(self._groups):
            tensors |= {f"{number}.rows": group.rows} | group.memory.tensors(str(number))
        return facts | {"length": self.length, "groups": groups}, tensors

    def restore(self, facts: files.Facts, tensors: Mapping[str, Tensor], device: Any) -> Stream:
        """This stream, which has seen nothing, going on from such contents; one of `files.FAULTS` where they are not
        those of a stream of its plans.
        """
        mine = [self.plan] if isinstance(self.plan, Plan) else [*self.plan]
        saved = [Plan.from_dict(plan) for plan in facts.plans]
        if saved != mine or facts.leaves != self.leaves:
            show = str if [*map(str, saved)] != [*map(str, mine)] or facts.leaves != self.leaves else repr
            raise ValueError(
                f"expected {_named([*map(show, mine)], self.leaves)}, got {_named([*map(show, saved)], facts.leaves)}; "
                "give the plan and leaves under which the file was saved"
            )
        left, groups, plans = dict(tensors), [], list(self._plans.items())
        for number, said in enumerate(facts.groups):
            held = {name: tensor.to(device) for name, tensor in files.taken(left, f"{number}.").items()}
            rows, gaps = checked_rows(held.pop("rows")), checked_gaps(said.gaps, facts.length)
            (plan, heads), rules = plans[said.plan], self._rules[said.plan]
            memory = _kind_of(plan).restored(rules, real_tokens(gaps, facts.length), said.held, held)
            key = memory.like()[0]
            heads = heads if self._by_head else [*range(key.shape[1])]
            if key.shape[:2] != (len(rows), len(heads)):
                raise ValueError(f"expected {len(rows)} sequences of {len(heads)} heads, got {[*key.shape[:2]]}")
            groups.append(Group(said.plan, torch.tensor(heads, device=rows.device), rows, gaps, memory))
        batch = len({row for group in groups for row in group.rows.tolist()})
        places = sorted((group.plan, row) for group in groups for row in group.rows.tolist())
        if left or places != [(plan, row) for plan in range(len(plans) if groups else 0) for row in range(batch)]:
            raise ValueError(f"expected every sequence in one group of each plan, got others, {sorted(left)}")
        kinds = {_like(group.memory, batch, self._by_head) for group in groups}
        if len(kinds) > 1 or (facts.length and not kinds):  # none, too, once cropped to nothing
            raise ValueError(f"expected the memory of {facts.length} tokens of one kind, got {len(kinds)}")
        self._groups, self._taken, self._kind = groups, facts.length, next(iter(kinds), None)
        return self

    def _settle(self) -> None:
        """Take in what was appended and never attended from."""
        if self._pending is not None:
            came, self._pending = self._pending, None
            self._take(None, 0.0, came)

    def _begin(self, kind: Kind) -> None:
        """Hold nothing of such tokens."""
        rows, whole = torch.arange(kind.batch, device=kind.device), [*range(kind.heads)]
        for number, (plan, heads) in enumerate(self._plans.items()):
            heads = heads if self._by_head else whole
            key, value = (
                torch.empty((kind.batch, len(heads), 0, dim), dtype=kind.dtype, device=kind.device)
                for dim in (kind.dim, kind.value_dim)
            )
            memory = _kind_of(plan).begin(self._rules[number], key, value)
            self._groups.append(Group(number, torch.tensor(heads, device=kind.device), rows, (), memory))
        self._kind = kind

    @full_precision()
    @torch.no_grad()
    def _take(self, query: Tensor | None, largest: float, came: Came) -> Tensor | None:
        """The outputs of queries of these tokens."""
        if self._kind is None:
            self._begin(came.kind)
        key, value, real, (of_key, of_value) = came
        scale = key.shape[3] ** -0.5 if self.scale is None else self.scale
        is_large = needs_rescaling((largest, of_key, of_value), scale, key.shape[3], working_dtype(key.dtype))
        if len(self._groups) == 1 and real is None:
            (group,) = self._groups
            group.memory.make_room(query, key, value)
            memory, output = group.memory.take(query, key, value, scale, is_large)
            if memory is not group.memory:
                self._groups = [replace(group, memory=memory)]
            self._taken += key.shape[2]
            return output
        groups = self._groups if real is None else [part for one in self._groups for part in one.by_padding(real)]
        ratio = 1 if query is None else query.shape[1] // key.shape[1]
        tokens = []
        for group in groups:
            asked = None if query is None else query[group.places(query, real, ratio)]
            at = group.places(key, real)
            tokens.append((asked, key[at], value[at]))
            group.memory.make_room(*tokens[-1])
        output = None if query is None else value.new_zeros((*query.shape[:3], value.shape[3]))
        for number, (group, rows) in enumerate(zip(groups, tokens, strict=True)):
            memory, part = group.memory.take(*rows, scale, is_large) if rows[1].shape[2] else (group.memory, None)
            if output is not None and part is not None:
                output[group.places(output, real, ratio)] = part
            groups[number] = replace(group, memory=memory)
        self._groups = groups if real is None else [group.padded(real, self._taken) for group in groups]
        self._taken += key.shape[2]
        return output


def _named(plans: Sequence[str], leaves: str | None) -> str:
    """The plan of all key heads, or the plan of each, and how keys and values are held."""
    held = f" with leaves={leaves!r}" if leaves else ""
    return f"the plan {plans[0]}{held}" if len(plans) == 1 else f"the plans of key heads {', '.join(plans)}{held}"


def _kind_of(plan: object) -> type[Memory]:
    """The kind of memory that a plan asks for."""
    kind = Coded if isinstance(plan, Plan) and plan.scanned else Constant
    return cast("type[Memory]", kind)


def _like(memory: Memory, batch: int, by_head: int) -> Kind:
    """The kind of tokens that memory of one plan holds."""
    key, value = memory.like()
    return Kind(batch, by_head or key.shape[1], key.shape[3], value.shape[3], memory.dtype, key.device)


def _part(came: Came, tokens: slice) -> Came:
    """Some of the tokens."""
    real = None if came.real is None else came.real[:, tokens]
    return Came(came.key[:, :, tokens], came.value[:, :, tokens], real, came.largest)
