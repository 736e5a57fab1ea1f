"""What of a key matters to a tree: the scores that queries like those seen so far would give it, and its value.

    feature_j = ( (k_j - mean k) L ,  0.8 r (v_j - mean v) )        L L^T = C + (3 tr C / D) I

with C the covariance of the scaled queries up to the end of the tree, centred: the mean query moves all scores of a
node together, which its mean key tells, and would hide by what they differ. r makes the root mean squares of both
parts equal over a tree. A key that one query in a thousand looks up stands out in directions that few queries use: so
most of the metric is the same in all directions, and values, which tell tokens apart, count nearly as much as keys.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from fewkeys.past.running import RunningQueries
from fewkeys.tree import native
from fewkeys.tree.rule import SINKS
from fewkeys.tree.sequences import Sequences

VALUES = 0.8
RIDGE = 3.0


def roots(sequences: Sequences, query: Tensor, blocks: Tensor, compiled: bool = False) -> Tensor:
    """L (H, E, D, D) after `blocks` (E,), ascending, sealed blocks; `query` (H, gqa_ratio, Nq, D) are scaled.

    Sums over a block are added to those before in order, in float64: so they are the same to the last bit whatever
    comes later. Before the first query the metric is a multiple of the identity.
    """
    asking = sequences.asking
    turn = turn_of(sequences.seen, sequences.block, sequences.is_causal)[asking]
    if compiled:
        counts = torch.bincount(turn[turn <= blocks[-1]], minlength=int(blocks[-1]) + 1)
        return native.roots(query, asking, counts.cumsum(0), blocks, RIDGE)
    return roots_after(query[:, :, asking], turn, blocks)


def turn_of(seen: Tensor, block: int, is_causal: bool = True) -> Tensor:
    """Of queries that see so many keys (N,): 0 for those at sinks, 1 for those of the first block after, and so on.

    The statistics of j sealed blocks are of the queries of turns 0 .. j. Without causality all are of turn 0.
    """
    if not is_causal:
        return torch.zeros_like(seen)
    return (seen - 1 - SINKS).div(block, rounding_mode="floor").clamp_min(-1) + 1


def roots_after(
    query: Tensor, turn: Tensor, blocks: Tensor, past: RunningQueries | None = None, compiled: bool = False
) -> Tensor:
    """The same of scaled queries (H, groups, M, D) of ascending `turn` (M,), and of those of the `past` before them.

    past: `count` (1, 1), `total` (H, 1, D), `square` (H, D, D), in float64.
    """
    first = min(int(blocks[0]), int(turn[0]) if turn.numel() else 0)
    turn = turn[turn <= blocks[-1]] - first
    counts = torch.bincount(turn, minlength=int(blocks[-1]) - first + 1)
    if compiled:
        every = torch.arange(turn.numel(), device=turn.device)
        return native.roots(query, every, counts.cumsum(0), blocks - first, RIDGE, past)
    # One row a turn, filled up by zeros: queries stand in the order of their turns.
    query = query[:, :, : turn.numel()].double()
    place = torch.arange(int(counts.max()), device=query.device)
    index = (counts.cumsum(0) - counts)[:, None] + place
    index = index.masked_fill(place >= counts[:, None], query.shape[2])
    rows = pad(query, (0, 0, 0, 1))[:, :, index].transpose(1, 2).flatten(2, 3)
    square = torch.stack([one.mT @ one for one in rows.unbind(1)], 1).cumsum(1)
    total, count = rows.sum(2, keepdim=True).cumsum(1), (counts.cumsum(0) * query.shape[1]).double()[None]
    if past is not None:
        count, total, square = past.count + count, past.total.unsqueeze(1) + total, past.square.unsqueeze(1) + square
    after = blocks - first
    moments = RunningQueries(count[:, after], total[:, after], square[:, after]).moments()
    covariance = moments.covariance
    least = RIDGE * covariance.diagonal(dim1=-2, dim2=-1).mean(-1)[..., None] + torch.finfo(torch.float32).tiny
    covariance.diagonal(dim1=-2, dim2=-1).add_(least)
    root, info = torch.linalg.cholesky_ex(covariance)
    # What rounding has made indefinite is measured coordinate by coordinate.
    plain = covariance.diagonal(dim1=-2, dim2=-1).clamp_min(0).sqrt().diag_embed()
    return torch.where((info > 0)[..., None, None], plain, root)


def features(key: Tensor, value: Tensor, root: Tensor) -> Tensor:
    """(N, z, D + Dv) of the keys (N, z, D) and values of N trees, with L (N, D, D)."""
    key = (key - key.mean(1, keepdim=True)) @ root
    value = value - value.mean(1, keepdim=True)
    energy = [part.square().sum((1, 2), keepdim=True) for part in (key, value)]
    ratio = energy[0] / energy[1].clamp_min(torch.finfo(key.dtype).tiny)
    return torch.cat([key, value * (VALUES * ratio.sqrt())], -1)
