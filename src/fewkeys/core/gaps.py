"""Positions counted over real keys: under causality padding, wherever it stands, is as if it had been deleted.

Rules that look at positions (blocks, windows, lists that are renewed) are written for keys that stand from position 0
on, with padding after them at most. Here any other padding is brought into that form, and outputs back to their places.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from fewkeys.core.inputs import Inputs
from fewkeys.core.rows import take


def has_gaps(inputs: Inputs) -> bool:
    """Whether a causal problem has a real key after padding."""
    valid = inputs.valid
    return inputs.is_causal and valid is not None and bool((valid[:, 1:] & ~valid[:, :-1]).any())


def is_torn(valid: Tensor) -> bool:
    """Whether a sequence (B, Nk) has padding between real keys: without it, distances are others."""
    return bool(((valid[:, 1:] & ~valid[:, :-1]).sum(-1) + valid[:, 0] > 1).any())


def without_gaps(inputs: Inputs, valid: Tensor, answer: Callable[[Inputs], Tensor]) -> Tensor:
    """What `answer` gives, (B, Hq, Nq, Dv), for the same problem without its padding; zero for queries of padding.

    `valid` (B, Nk): that of the inputs. Sequences from the first position on are moved together; queries that come
    later stand at other positions in each of them, so those padded alike are answered together.
    """
    asked = pad(valid, (0, max(0, inputs.queries + inputs.offset - inputs.keys)), value=True)
    asked = asked[:, inputs.offset : inputs.offset + inputs.queries]
    return (_each if inputs.offset else _all)(inputs, valid, asked, answer)


def _all(x: Inputs, valid: Tensor, asked: Tensor, answer: Callable[[Inputs], Tensor]) -> Tensor:
    keys, queries = _first(valid), _first(asked)
    own = replace(
        x,
        query=_moved(x.query, queries),
        key=_moved(x.key, keys),
        value=_moved(x.value, keys),
        valid=valid.gather(-1, keys),
        _memory={},
    )
    found = _moved(answer(own), queries.argsort(-1))
    return found.masked_fill(~asked[:, None, :, None], 0.0)


def _each(x: Inputs, valid: Tensor, asked: Tensor, answer: Callable[[Inputs], Tensor]) -> Tensor:
    output = x.value.new_zeros((x.batch, x.query_heads, x.queries, x.value_dim))
    kinds, kind = valid.unique(dim=0, return_inverse=True)
    for number, real in enumerate(kinds):
        rows = (kind == number).nonzero().squeeze(-1)
        own = asked[rows[0]]
        if not bool(own.any() & real.any()):
            continue
        query = x.query[rows][:, :, own]
        key, value = (part[rows][:, :, real] for part in (x.key, x.value))
        before = int(real[: x.offset].sum()) + max(0, x.offset - x.keys)
        found = answer(replace(x, query=query, key=key, value=value, offset=before, valid=None, _memory={}))
        output[rows[:, None], :, own.nonzero().squeeze(-1)] = found.transpose(1, 2)
    return output


def _first(real: Tensor) -> Tensor:
    """The order (B, N) in which the real places come first."""
    return (~real).to(torch.int8).argsort(dim=-1, stable=True)


def _moved(rows: Tensor, order: Tensor) -> Tensor:
    return take(rows, order[:, None].expand(-1, rows.shape[1], -1))
