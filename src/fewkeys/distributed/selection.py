"""Selection in two rounds that send only scores: every rank chooses among its own keys, then all cut the union."""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from fewkeys.core.inputs import Inputs
from fewkeys.core.rows import marked_places, take
from fewkeys.distributed.communicator import Communicator
from fewkeys.distributed.totals import gather
from fewkeys.select.base import Sharded


@dataclass(frozen=True, eq=False)
class KeptKeys:
    """The keys of all ranks that L lists keep, a number of lists for each key head.

    `index` (B, L, S): the positions of this rank's keys in its shard, ascending, S the largest of its counts;
    `counts` (ranks, B, L): how many each rank keeps.
    """

    index: Tensor
    counts: Tensor

    @cached_property
    def width(self) -> int:
        """The largest count of a rank, at least 1."""
        return max(1, int(self.counts.max()))

    @cached_property
    def used(self) -> Tensor:
        """(B, L, ranks width): which entries of `gathered` are kept keys."""
        used = torch.arange(self.width, device=self.counts.device) < self.counts.unsqueeze(-1)
        return used.movedim(0, 2).flatten(2)

    def gathered(self, rows: Tensor, comm: Communicator) -> Tensor:
        """The rows (B, L, ranks width, F) of kept keys, `width` of each rank, from its rows (B, Hkv, N, F)."""
        local = take(rows, self.index.unflatten(1, (rows.shape[1], -1))).flatten(1, 2)
        return gather(local, self.width, comm).movedim(0, 2).flatten(2, 3)


def select(rule: Sharded, inputs: Inputs, comm: Communicator) -> KeptKeys:
    """The keys of all ranks that a rule keeps, the same as in one process."""
    score = rule.score(inputs)
    if rule.count is not None:
        return best(score, rule.count, comm)
    kept = score >= (rule.least or 0.0)
    return KeptKeys(marked_places(kept), torch.stack(comm.all_gather(kept.sum(-1))))


def best(score: Tensor, count: int, comm: Communicator) -> KeptKeys:
    """The `count` keys of largest score (B, Hkv, N_local) of all ranks."""
    local = score.topk(min(count, score.shape[-1]), -1).indices.sort(-1).values
    gathered = comm.all_gather_rows(score.gather(-1, local).movedim(-1, 0))
    offered = torch.cat(gathered).movedim(0, -1)
    # Stable: of equal scores all ranks keep the first.
    largest = offered.argsort(dim=-1, descending=True, stable=True)[..., :count]
    marked = torch.zeros_like(offered, dtype=torch.bool).scatter_(-1, largest, True)
    parts = marked.split([len(part) for part in gathered], -1)
    order = marked_places(parts[comm.rank])
    return KeptKeys(local.gather(-1, order), torch.stack([part.sum(-1) for part in parts]))
