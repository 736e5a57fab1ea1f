"""Exact attention, the reference for every plan of a comparison: `W = softmax(scale * query key^T)`, output `W value`.

W (n x n) exists for one block of sequences and heads at a time, and serves all plans.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from fewkeys.captures.capture import AttentionInputs
from fewkeys.core.gaps import has_interior_padding
from fewkeys.core.graph import visible

BLOCK = 2**22
"""Entries of W in a block (float32: 16 MB). glibc maps more than 32 MB anew each time, which takes as long as the
arithmetic.
"""
TIMED = 2**25
"""The most entries of W that plans are timed on: oracles store them."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Block(AttentionInputs):
    """A part of an attention call without padding: the query heads `heads`, sequences from `sequence` on."""

    heads: slice
    sequence: int


@dataclass(frozen=True)
class Exact:
    """Exact attention in a block: `weights` (B, H, N, Nk), `output` (B, H, N, Dv), `heavy`: weights >= eps."""

    weights: Tensor
    output: Tensor
    heavy: Tensor


def first_sequence(call: AttentionInputs) -> Block:
    """The first sequence of a call that has tokens, with as many heads as fit into `TIMED` entries of W."""
    entries = call.query.shape[1] * call.query.shape[2] * call.key.shape[2]
    return next(blocks(call, min(entries, TIMED)))


def blocks(call: AttentionInputs, most: int | None = None) -> Iterator[Block]:
    """Cut one attention call into blocks of at most `most` (`BLOCK`) entries of W, or one sequence and key head.

    Padding is cut out, of the queries too: padded sequences take a block each.
    """
    query, key, value = call.query, call.key, call.value
    mask, query_mask = (None if m is None or bool(m.all()) else m for m in (call.key_mask, call.real_queries))
    if mask is not None and (got := call.query_offset):
        raise ValueError(f"query_offset: expected 0 for padded sequences, got {got}; capture whole sequences")
    if mask is not None and call.distance_bias is not None and has_interior_padding(mask):
        raise ValueError("key_mask: expected contiguous real keys with distance_bias, got padding between them")
    group = query.shape[1] // key.shape[1]
    most, size = BLOCK if most is None else most, query.shape[2] * key.shape[2] * group
    heads = max(1, min(key.shape[1], most // size))
    rows = 1 if mask is not None or query_mask is not None else max(1, most // (size * heads))
    for b in range(0, query.shape[0], rows):
        q, k, v = (x[b : b + rows] for x in (query, key, value))
        if mask is not None:
            k, v = k[:, :, mask[b]], v[:, :, mask[b]]
        if query_mask is not None:
            q = q[:, :, query_mask[b]]
        if not q.shape[2] or not k.shape[2]:
            continue
        for h in range(0, key.shape[1], heads):
            part = slice(h, h + heads)
            query_heads = slice(h * group, (h + heads) * group)
            arguments = (q[:, query_heads], k[:, part], v[:, part], call.scale, call.is_causal)
            bias = None if call.distance_bias is None else call.distance_bias[query_heads]
            yield Block(*arguments, query_offset=call.query_offset, distance_bias=bias, heads=query_heads, sequence=b)


def exact(block: Block, eps: float) -> Exact:
    """Weights, output and heavy entries of a block, in float32: O(B H N Nk (D + Dv)) time, O(B H N Nk) memory."""
    x = block.checked()
    key, value = (rows.float().repeat_interleave(x.gqa_ratio, 1) for rows in (x.key, x.value))
    weights = x.query.float() @ (key * x.scale).mT
    if x.bias is not None:
        weights += x.bias.of(x.offset, x.offset + x.queries, x.keys)
    if x.is_causal:
        weights.masked_fill_(~visible(x, 0, x.queries), -torch.inf)
    weights = weights.softmax(-1)
    return Exact(weights, weights @ value, weights >= eps)
