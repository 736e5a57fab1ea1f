"""Two rounds of selection that send only scores: every rank chooses among its own keys, then all cut the union."""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from fewkeys.core.inputs import Inputs
from fewkeys.core.rows import marked_places
from fewkeys.distributed.communicator import Communicator
from fewkeys.select.base import Sharded


@dataclass(frozen=True, eq=False)
class KeptKeys:
    """The keys of all ranks that are kept.

    `index` (B, Hkv, S): this rank's kept keys as positions in its shard, ascending, S the largest of its counts;
    `counts` (ranks, B, Hkv): how many each rank keeps.
    """

    index: Tensor
    counts: Tensor

    @cached_property
    def width(self) -> int:
        """The largest count of a rank, at least 1."""
        return max(1, int(self.counts.max()))


def select(rule: Sharded, inputs: Inputs, comm: Communicator) -> KeptKeys:
    """The keys that a rule keeps of all ranks, the same as in one process."""
    score = rule.score(inputs)
    if rule.count is not None:
        return best(score, rule.count, comm)
    kept = score >= (rule.least or 0.0)
    return KeptKeys(marked_places(kept), torch.stack(comm.all_gather(kept.sum(-1))))


def best(score: Tensor, count: int, comm: Communicator) -> KeptKeys:
    """The `count` keys of largest score (B, Hkv, N_local) of all ranks."""
    local = score.topk(min(count, score.shape[-1]), -1).indices.sort(-1).values
    gathered = comm.all_gather_rows(score.gather(-1, local).movedim(-1, 0))
    parts = marked_largest(torch.cat(gathered).movedim(0, -1), count).split([len(part) for part in gathered], -1)
    order = marked_places(parts[comm.rank])
    return KeptKeys(local.gather(-1, order), torch.stack([part.sum(-1) for part in parts]))


def marked_largest(score: Tensor, count: int) -> Tensor:
    """Marks the `count` largest scores of every row; of equal ones the first, so that all ranks choose alike."""
    best = score.argsort(dim=-1, descending=True, stable=True)[..., :count]
    return torch.zeros_like(score, dtype=torch.bool).scatter_(-1, best, True)
