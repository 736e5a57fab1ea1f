"""Selection that sends only scores: every rank chooses among its own keys, then all cut the union."""

import torch
from torch import Tensor
from torch.nn.functional import pad

from fewkeys.core.inputs import Inputs
from fewkeys.core.rows import take
from fewkeys.select.base import Sharded


def select(inputs: Inputs, rule: Sharded) -> tuple[Tensor, Tensor]:
    """The positions (B, Hkv, S) in the whole sequence of the keys that a rule keeps, the same as in one process, and
    which entries are used.
    """
    score, count = rule.score(inputs), rule.count
    if count is None:
        kept = score >= (rule.least or 0.0)
        score = score.masked_fill(~kept, -torch.inf)
        count = max(1, int(inputs.whole.totals.sum(kept.sum(-1)).max()))
    return best(inputs, score, count)


def best(inputs: Inputs, score: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The positions (B, L, S) of the keys of all ranks with the `count` largest scores (B, L, N_local), ascending, and
    which scores are above -inf.
    """
    whole = inputs.whole
    local = score.topk(min(count, score.shape[-1]), -1).indices.sort(-1).values
    offered, position = map(whole.totals.rows, (score.gather(-1, local), local + whole.first_key))
    # Stable: of equal scores all ranks keep the first.
    order = offered.argsort(dim=-1, descending=True, stable=True)[..., :count].sort(-1).values
    return position.gather(-1, order), offered.gather(-1, order) > -torch.inf


def rows_at(inputs: Inputs, rows: Tensor, position: Tensor) -> Tensor:
    """The rows (B, Hkv, S, F) at positions (B, Hkv, S) of the whole sequence, from each rank's own (B, Hkv, N, F);
    zeros outside the sequence. Every rank sends about `2 B Hkv S F` numbers, and in the backward pass.
    """
    index, own = position - inputs.whole.first_key, rows.shape[2]
    index = index.where((index >= 0) & (index < own), own)
    return inputs.whole.totals.sum(take(pad(rows, (0, 0, 0, 1)), index))
