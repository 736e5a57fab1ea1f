"""Two rounds of selection over ranks: every rank chooses among its own keys, then all cut the union to the budget."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fewkeys.core.inputs import Inputs
from fewkeys.core.precision import working
from fewkeys.distributed.communicator import Communicator
from fewkeys.distributed.keys import OverRanks
from fewkeys.select import KeyNorm, Leverage, RandomKeys
from fewkeys.select.controls import uniform
from fewkeys.sketch.leverage import ROUNDING
from fewkeys.sketch.lewis import sensitivity_bounds


@dataclass(frozen=True, eq=False)
class Kept:
    """The keys of all ranks that are kept.

    `index` (B, Hkv, S): this rank's kept keys as positions in its shard, ascending, at the head of each list;
    `counts` (ranks, B, Hkv): how many each rank keeps. S is the largest of this rank's counts.
    """

    index: Tensor
    counts: Tensor


ALONE = (Leverage, KeyNorm, RandomKeys)
"""Rules that need nothing but scores of single keys."""


def select(keep: Leverage | KeyNorm | RandomKeys, inputs: Inputs, tokens: list[int], comm: Communicator) -> Kept:
    """The kept keys, the same as `keep` would choose in one process. `tokens` are the shards' lengths."""
    if isinstance(keep, Leverage):
        score = _leverage(keep, inputs, tokens, comm)
        if keep.eps is not None:
            marked = score >= keep.eps * (1 - ROUNDING)
            return kept_of(marked, comm)
        return best(score, keep.count or 0, comm)
    if isinstance(keep, RandomKeys):
        # Every rank draws the numbers of all tokens: as many as one process would, hence the same keys.
        drawn = uniform(inputs, (inputs.batch, inputs.kv_heads, sum(tokens)))
        score = drawn.split(tokens, -1)[comm.rank]
    else:
        score = working(inputs.key.detach()).square().sum(-1)
    return best(score, keep.count, comm)


def _leverage(keep: Leverage, inputs: Inputs, tokens: list[int], comm: Communicator) -> Tensor:
    """Scores (B, Hkv, N_local), float64, against the keys of all ranks."""
    rows = working(inputs.key.detach())
    if keep.centre:
        mean = comm.all_reduce(rows.double().sum(-2, keepdim=True)) / sum(tokens)
        rows = rows - mean.to(rows.dtype)
    return sensitivity_bounds(rows, keep.power, OverRanks(comm))


def best(score: Tensor, count: int, comm: Communicator) -> Kept:
    """The `count` keys of largest score (B, Hkv, N_local) of all ranks.

    Round 1: the best `count` of each rank, of which only the scores are sent. Round 2: the best of these. So keys and
    values are sent of the winners alone, `count` per head over all ranks.
    """
    local = score.topk(min(count, score.shape[-1]), -1).indices.sort(-1).values
    gathered = comm.all_gather_rows(score.gather(-1, local).movedim(-1, 0))
    candidates = torch.cat(gathered).movedim(0, -1)
    # Stable: all ranks must cut alike where scores are equal.
    best = candidates.argsort(dim=-1, descending=True, stable=True)[..., :count]
    won = torch.zeros_like(candidates, dtype=torch.bool).scatter_(-1, best, True)
    parts = won.split([part.shape[0] for part in gathered], -1)
    order = _listed(parts[comm.rank])
    return Kept(local.gather(-1, order), torch.stack([part.sum(-1) for part in parts]))


def kept_of(marked: Tensor, comm: Communicator) -> Kept:
    """The keys that the ranks mark, (B, Hkv, N_local) bool on each."""
    return Kept(_listed(marked), torch.stack(comm.all_gather(marked.sum(-1))))


def _listed(marked: Tensor) -> Tensor:
    """The positions of the marked entries (B, H, N), ascending and first in lists as long as the longest needs."""
    longest = int(marked.sum(-1).max()) if marked.numel() else 0
    return marked.to(torch.int8).argsort(dim=-1, descending=True, stable=True)[..., :longest]
