"""A scan over token shards: each rank scans its own keys for the queries of all ranks.

    queries   gathered from all ranks
    keys      each rank gathers the scores and places of the best keys, and cuts them to the budget as all ranks do
    means     from sums over all ranks; the rank that holds a query attends to them
    outputs   each rank attends to the chosen keys that it holds; largest scores and sums of weights join the parts

As in one process, codes are relative to the first block, and the first of equal scores is kept.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from fewkeys.core.inputs import Inputs
from fewkeys.core.precision import working
from fewkeys.core.rows import take
from fewkeys.core.totals import row_maximum
from fewkeys.core.weights import Softmax, positive
from fewkeys.distributed.communicator import Communicator
from fewkeys.distributed.selection import marked_largest
from fewkeys.distributed.totals import OverRanks, gather
from fewkeys.plan import Plan
from fewkeys.rest import BlockMeans, Drop
from fewkeys.rest.base import RangeStandIns
from fewkeys.select.key_scan import before_block
from fewkeys.sketch.codes import BLOCK, NONE, Frame, encode, largest, rounded, scores


def check_scan(plan: Plan) -> None:
    """Raise `ValueError` unless all parts of a plan work over ranks."""
    if len(plan.parts) > 1 or not isinstance(plan.rest, BlockMeans | Drop) or not isinstance(plan.weights, Softmax):
        raise ValueError(
            "keep: expected KeyScan alone, with BlockMeans or Drop() and Softmax(), which works over ranks, got "
            f"{plan}; fewkeys.budget(slots, is_causal=True) is such a plan"
        )


def attend(inputs: Inputs, plan: Plan, asked: Sequence[int], comm: Communicator) -> Tensor:
    """The output (B, Hq, Nq, Dv) of this rank's queries. `asked`: the number of queries on each rank.

    A rank sends its queries, and for each query of all ranks 8 bytes a chosen key and `2 Dv` numbers.
    Cost O(sum Nq (N_local W + count (D + Dv))).
    """
    x, place = inputs, inputs.whole
    gathered = gather(x.query, max(1, *asked), comm)
    query = torch.cat([of_rank[:, :, :count] for of_rank, count in zip(gathered, asked, strict=True)], 2)
    zero = x.key.new_zeros(())
    key, value = (zero.expand(x.batch, x.kv_heads, place.keys, dim) for dim in (x.head_dim, x.value_dim))
    whole = Inputs(query.detach(), key, value, x.scale, x.is_causal)
    local = slice(place.first_query, place.first_query + x.queries)
    shard = _Shard(whole, working(x.key), working(x.value), place.first_key, local)
    with torch.no_grad():
        chosen, places = _choose(shard, plan.scanned, comm)
    means = None
    if isinstance(plan.rest, BlockMeans):
        means = plan.rest.of_totals(whole, shard.totals(comm), None)
    parts = [shard.scored(query, chosen, places, means, start) for start in range(0, whole.queries, BLOCK)]
    tops = torch.cat([row_maximum(score.detach()) for score, _ in parts], 2)
    mixed = []
    for (score, values), top in zip(parts, comm.all_reduce(tops, "max").split(BLOCK, 2), strict=True):
        weight = (score - top).exp()
        mixed.append(torch.cat([shard.mix(weight, values), weight.sum(-1, keepdim=True)], -1))
    joined = OverRanks(comm).sum(torch.cat(mixed, 2))[:, :, local]
    return (joined[..., :-1] / positive(joined[..., -1:])).to(x.query.dtype)


@dataclass(frozen=True, eq=False)
class _Shard:
    """This rank's keys and values. `first`: the place of its first key; `local`: its queries."""

    whole: Inputs
    key: Tensor
    value: Tensor
    first: int
    local: slice

    @property
    def keys(self) -> int:
        return self.key.shape[2]

    def totals(self, comm: Communicator) -> Tensor:
        """(B, Hkv, G + 1, D + Dv), float64: sums of all ranks' keys and values before each block and the end."""
        rows = torch.cat([self.key, self.value], -1).double()
        block = (torch.arange(self.keys, device=rows.device) + self.first) // BLOCK
        zeros = rows.new_zeros((*rows.shape[:2], -(-self.whole.keys // BLOCK), rows.shape[3]))
        return pad(OverRanks(comm).sum(zeros.index_add(2, block, rows)).cumsum(2), (0, 0, 1, 0))

    def scored(
        self, query: Tensor, chosen: Tensor, places: Tensor, means: RangeStandIns | None, start: int
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """The scores (B, Hq, M, keys) of the block of queries from `start` on, -inf for keys of other ranks, and the
        values: of the queries' own block, of chosen keys and of means.
        """
        x = self.whole
        stop = min(start + BLOCK, x.queries)
        rows = (query[:, :, start:stop] * x.scale).unflatten(1, (x.kv_heads, -1))
        unchosen = (start, stop) if x.is_causal else (0, 0)  # the places of keys that queries see without choosing
        near = slice(*(min(max(0, edge - self.first), self.keys) for edge in unchosen))
        place, asking = (torch.arange(n, device=rows.device) for n in (self.keys, stop))
        late = place[near] + self.first > asking[start:, None]
        far = chosen[:, :, start:stop].unflatten(1, (x.kv_heads, -1))
        at_least_one = (part if self.keys else pad(part, (0, 0, 0, 1)) for part in (self.key, self.value))
        keys, values = (take(part, far.clamp_min(0)) for part in at_least_one)
        columns = [
            (rows @ self.key[:, :, None, near].mT).masked_fill(late, -torch.inf),
            (keys @ rows.unsqueeze(-1)).squeeze(-1).masked_fill(far < 0, -torch.inf),
        ]
        attended: tuple[Tensor, ...] = (self.value[:, :, None, near], values)
        if means is not None:
            step = int(means.step(x, start, start + 1))
            kept = places[:, :, start:stop].unflatten(1, (x.kv_heads, -1))
            left = means.remaining(step, means.size[:, None, None, None, step], kept)
            elsewhere = (asking[start:] < self.local.start) | (asking[start:] >= self.local.stop)
            score = rows @ means.key[:, :, None, step].mT + left.clamp_min(1).log()
            columns.append(score.masked_fill((left <= 0) | elsewhere[:, None], -torch.inf))
            attended = (*attended, means.value[:, :, None, step])
        return torch.cat(columns, -1).flatten(1, 2), attended

    def mix(self, weight: Tensor, values: tuple[Tensor, ...]) -> Tensor:
        """The sums (B, Hq, M, Dv) of the values of `scored` under weights (B, Hq, M, keys)."""
        weight = weight.unflatten(1, (self.whole.kv_heads, -1))
        near, far, *means = weight.split([part.shape[-2] for part in values], -1)
        mixed = near @ values[0] + (far.unsqueeze(-2) @ values[1]).squeeze(-2)
        if means:
            mixed = mixed + means[0] @ values[2]
        return torch.flatten(mixed, 1, 2)


def _choose(shard: _Shard, count: int, comm: Communicator) -> tuple[Tensor, Tensor]:
    """The keys that queries choose, (B, Hq, N, .): this rank's own, negative for none, and the places of all."""
    x, seen = shard.whole, before_block(shard.whole)
    first_block = OverRanks(comm).rows(shard.key[:, :, : max(0, BLOCK - shard.first)])
    codes = encode(shard.key, Frame.of(first_block))
    level, sigma = codes.levels()[:, :, : shard.keys], codes.sigma[:, :, : shard.keys]
    query, place = rounded(x.query, x.scale), torch.arange(shard.keys, device=x.query.device) + shard.first
    chosen = []
    for start in range(0, x.queries, BLOCK):
        part = slice(start, start + BLOCK)
        score = scores(query[:, :, part], level, sigma).masked_fill(place >= seen[part, None], NONE)
        index = largest(score, min(count, shard.keys))
        score = score.gather(-1, index.clamp_min(0).long()).masked_fill(index < 0, NONE)
        chosen.append((index, score.to(index.dtype)))
    index, score = (torch.cat(parts, 2) for parts in zip(*chosen, strict=True))
    offered = comm.all_gather_rows(torch.stack([score, index + shard.first], -1).int().movedim(3, 0))
    of_all = torch.cat(offered).movedim(0, 3)
    kept = marked_largest(of_all[..., 0], count) & (of_all[..., 0] > NONE)
    places = of_all[..., 1].masked_fill(~kept, -1).long()
    before = sum(len(part) for part in offered[: comm.rank])
    return places[..., before : before + index.shape[-1]] - shard.first, places
