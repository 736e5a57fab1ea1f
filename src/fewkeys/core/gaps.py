"""Removal of padding before real keys: rules on causal positions count real keys only."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from fewkeys.core.inputs import Inputs
from fewkeys.core.rows import take


def has_interior_padding(valid: Tensor) -> bool:
    """Whether any sequence of (B, Nk) has padding between real keys; removing it would change distances."""
    return bool(((valid[:, 1:] & ~valid[:, :-1]).sum(-1) + valid[:, 0] > 1).any())


Restore = Callable[[Sequence[Tensor]], Tensor]


def without_gaps(inputs: Inputs) -> tuple[list[Inputs], Restore]:
    """The problem in parts, and a function that joins their outputs (B, Hq, Nq, Dv), which are zero for padding that
    moves.

    No part of a causal problem has padding before a real key. Without an offset it moves to the end; with one, it
    changes the positions of queries, so sequences with the same padding are a part. Sequences without such padding
    stay as they are, whatever the others have.
    """
    kept = kept_places(inputs)
    if kept is None or inputs.valid is None:
        return [inputs], lambda outputs: outputs[0]
    if inputs.bias is not None and has_interior_padding(inputs.valid):
        raise ValueError("key_mask: expected contiguous real keys with distance_bias, got padding between them")
    return (_by_padding if inputs.offset else _together)(inputs, inputs.valid, *kept)


def kept_places(inputs: Inputs) -> tuple[Tensor, Tensor] | None:
    """(B, Nk) and (B, Nq): the keys and queries of a causal problem that `without_gaps` keeps; None: all."""
    valid = inputs.valid
    if valid is None or not inputs.is_causal:
        return None
    has_gap = (valid[:, 1:] & ~valid[:, :-1]).any(-1, keepdim=True)
    if not bool(has_gap.any()):
        return None
    kept = valid | ~has_gap
    queries = pad(kept, (0, max(0, inputs.queries + inputs.offset - inputs.keys)), value=True)
    return kept, queries[:, inputs.offset : inputs.offset + inputs.queries]


def _together(x: Inputs, valid: Tensor, kept: Tensor, kept_queries: Tensor) -> tuple[list[Inputs], Restore]:
    # Kept places come first.
    keys, queries = ((~places).to(torch.int8).argsort(dim=-1, stable=True) for places in (kept, kept_queries))
    query, key, value = _moved(x.query, queries), _moved(x.key, keys), _moved(x.value, keys)
    moved = replace(x, query=query, key=key, value=value, valid=valid.gather(-1, keys), _memory={})

    def restore(outputs: Sequence[Tensor]) -> Tensor:
        return _moved(outputs[0], queries.argsort(-1)).masked_fill(~kept_queries[:, None, :, None], 0.0)

    return [moved], restore


def _by_padding(x: Inputs, valid: Tensor, kept: Tensor, kept_queries: Tensor) -> tuple[list[Inputs], Restore]:
    patterns, pattern = kept.unique(dim=0, return_inverse=True)
    parts: list[Inputs] = []
    places: list[tuple[Tensor, Tensor]] = []
    for number, real in enumerate(patterns):
        rows = (pattern == number).nonzero().squeeze(-1)
        real_queries = kept_queries[rows[0]]
        if not bool(real_queries.any()):
            continue
        query, key, value = x.query[rows][:, :, real_queries], x.key[rows][:, :, real], x.value[rows][:, :, real]
        before, valid_keys = int(real[: x.offset].sum()) + max(0, x.offset - x.keys), valid[rows][:, real]
        padded = None if bool(valid_keys.all()) else valid_keys
        parts.append(replace(x, query=query, key=key, value=value, offset=before, valid=padded, _memory={}))
        places.append((rows[:, None], real_queries.nonzero().squeeze(-1)))

    def restore(outputs: Sequence[Tensor]) -> Tensor:
        whole = x.value.new_zeros((x.batch, x.query_heads, x.queries, x.value_dim))
        for output, (rows, queries) in zip(outputs, places, strict=True):
            whole[rows, :, queries] = output.transpose(1, 2)
        return whole

    return parts, restore


def _moved(rows: Tensor, order: Tensor) -> Tensor:
    return take(rows, order[:, None].expand(-1, rows.shape[1], -1))
