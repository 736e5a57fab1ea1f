"""Removal of padding before real keys, which rules on causal positions do not count."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from torch import Tensor
from torch.nn.functional import pad

from fewkeys.core.inputs import Inputs


def has_interior_padding(valid: Tensor) -> bool:
    """Whether any sequence of (B, Nk) has padding between real keys; removing it would change distances."""
    return bool(((valid[:, 1:] & ~valid[:, :-1]).sum(-1) + valid[:, 0] > 1).any())


Restore = Callable[[Sequence[Tensor]], Tensor]


def without_gaps(inputs: Inputs) -> tuple[list[Inputs], Restore]:
    """The problem in parts, and a function that joins their outputs (B, Hq, Nq, Dv), zero for removed padding.

    No part of a causal problem has padding before a real key. Sequences with the same such padding are a part.
    """
    x, valid = inputs, inputs.valid
    if valid is None or not x.is_causal:
        return [x], lambda outputs: outputs[0]
    has_gap = (valid[:, 1:] & ~valid[:, :-1]).any(-1, keepdim=True)
    if not bool(has_gap.any()):
        return [x], lambda outputs: outputs[0]
    if x.bias is not None and has_interior_padding(valid):
        raise ValueError("key_mask: expected contiguous real keys with distance_bias, got padding between them")
    kept = valid | ~has_gap
    kept_queries = pad(kept, (0, max(0, x.queries + x.offset - x.keys)), value=True)
    kept_queries = kept_queries[:, x.offset : x.offset + x.queries]
    parts: list[Inputs] = []
    places: list[tuple[Tensor, Tensor]] = []
    for real in kept.unique(dim=0):
        rows = (kept == real).all(-1).nonzero().squeeze(-1)
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
