"""Whether what a file holds is the memory of a stream: kernels trust every shape and place in it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from fewkeys.core.tensor_files import Form, check, check_form
from fewkeys.core.validation import FLOATS
from fewkeys.past.state import State, tensors_of
from fewkeys.streaming.heavy import HeavyKeys
from fewkeys.streaming.parts import Parts

COUNTS = ("summary.size", "summary.seen.count", "summary.seen.square", "queries.count")


def check_rows(tensors: Mapping[str, Tensor], root: str) -> tuple[Tensor, Tensor]:
    """Keys (B, Hkv, N, D) and values (B, Hkv, N, Dv) under the names "key" and "value", by which all else must go."""
    key, value = tensors.get(f"{root}key"), tensors.get(f"{root}value")
    if key is None or value is None or key.ndim != 4 or key.dtype not in FLOATS or 0 in (*key.shape[:2], key.shape[3]):
        raise ValueError(f"expected {root}key and {root}value (batch, heads, tokens, dim), got none such")
    check_form(f"{root}value", value, Form((*key.shape[:3], None), key.dtype))
    if not value.shape[3]:
        raise ValueError(f"expected {root}value of at least one dimension, got {tuple(value.shape)}")
    return key, value


def check_summarised(
    tensors: Mapping[str, Tensor], length: int, moved: int, parts: Parts, state: State, heavy: Sequence[HeavyKeys]
) -> None:
    """`ValueError` where tensors are not such a memory; `state` and `heavy` are those of an empty one."""
    since = length - moved
    if moved < 0 or not 0 <= since <= parts.unit or moved % parts.unit:
        raise ValueError(f"expected a unit of {parts.unit} positions, got one from {moved} to {length}")
    near = tensors["near.key"].shape[2]
    if not length - parts.needed_from(moved) <= near <= length:
        raise ValueError(f"expected the near tokens that the plan needs after {length}, got {near}")
    forms = {name: Form(tuple(like.shape), like.dtype) for name, like in tensors_of(state).items()}
    asked = forms["asked"].shape
    forms["asked"] = forms["asked"]._replace(shape=(*asked[:2], max(1, _size(tensors, "asked", 2)), since, asked[4]))
    forms["answered"] = forms["answered"]._replace(shape=(asked[0], since))
    forms |= _tokens("near.", tensors_of(state.near), near, length)
    forms |= _tokens("sinks.", tensors_of(state.sinks), min(parts.sinks, _size(tensors, "sinks.place", 2)), length)
    for number, one in enumerate(heavy):
        root = f"heavy{number}."
        count = min(one.count, _size(tensors, f"{root}number", 2))
        forms |= _tokens(f"{root}rows.", tensors_of(one.rows), count, length)
        forms[f"{root}number"] = Form((*asked[:2], count), one.number.dtype)
        forms |= _sums(one, tensors, f"{root}sums.")
    forms |= {name: forms[name]._replace(least=0) for name in COUNTS}
    forms["summary.excess"] = forms["summary.excess"]._replace(infinite=True)
    check(tensors, forms)
    place, size, excess = tensors["near.place"], tensors["summary.size"], tensors["summary.excess"]
    if not torch.equal(place, torch.arange(length - near, length, device=place.device).expand_as(place)):
        raise ValueError("expected near tokens at the last places in a row, got others")
    if not torch.equal(excess.isinf(), size == 0) or bool((excess == torch.inf).any()):
        raise ValueError("expected an excess of -inf at the free places of the summary alone, got it elsewhere")
    if bool((size.sum(-1) > tensors["summary.seen.count"]).any()) or bool((size.sum(-1) > length).any()):
        raise ValueError("expected a summary of keys that were seen, got more")
    _check_squares(tensors["queries.square"])


def _tokens(root: str, like: Mapping[str, Tensor], count: int, length: int) -> dict[str, Form]:
    """The forms of `count` tokens like these, before place `length`."""
    forms = {root + name: Form((*x.shape[:2], count, *x.shape[3:]), x.dtype) for name, x in like.items()}
    return forms | {f"{root}place": forms[f"{root}place"]._replace(least=0, most=max(0, length - 1))}


def _sums(one: HeavyKeys, tensors: Mapping[str, Tensor], root: str) -> dict[str, Form]:
    """The forms of what a score remembers once it has seen a key: as it remembers one."""
    if not any(name.startswith(root) for name in tensors):
        return {}
    key = one.rows.key
    one.score.offer(key.new_zeros((*key.shape[:2], 1, key.shape[3]), dtype=one.number.dtype), None)
    return {root + name: Form(tuple(like.shape), like.dtype) for name, like in one.score.sums.items()}


def _check_squares(square: Tensor) -> None:
    if bool((square.diagonal(dim1=-2, dim2=-1) < 0).any()):
        raise ValueError("expected squares of queries, got negative ones")


def _size(tensors: Mapping[str, Tensor], name: str, axis: int) -> int:
    """The size of a tensor that may be missing or have fewer dimensions."""
    found = tensors.get(name)
    return 0 if found is None or found.ndim <= axis else found.shape[axis]
