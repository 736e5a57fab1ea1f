"""A scan over token shards: each rank scans its own keys for the queries of all ranks.

    queries   gathered from all ranks
    keys      each rank gathers the scores and places of the best keys, and cuts them to the budget as all ranks do
    means     from sums over all ranks; the rank that holds a query attends to them
    outputs   each rank attends to the chosen keys that it holds; largest scores and sums of weights join the parts

As in one process, codes are relative to the first block, and the first of equal scores is kept.
"""

from collections.abc import Sequence
from dataclasses import replace

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
from fewkeys.distributed.totals import gather
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
    x = replace(inputs, key=working(inputs.key), value=working(inputs.value))
    gathered = gather(x.query, max(1, *asked), comm)
    query = torch.cat([of_rank[:, :, :count] for of_rank, count in zip(gathered, asked, strict=True)], 2)
    # All queries, and as many keys as there are, without their numbers.
    zero = x.key.new_zeros(())
    key, value = (zero.expand(x.batch, x.kv_heads, x.whole.keys, dim) for dim in (x.head_dim, x.value_dim))
    whole = Inputs(query, key, value, x.scale, x.is_causal)
    with torch.no_grad():
        chosen, places = _choose(x, whole, plan.scanned, comm)
    means = plan.rest.of_totals(whole, _totals(x), None) if isinstance(plan.rest, BlockMeans) else None
    parts = [_scored(x, whole, chosen, places, means, start) for start in range(0, whole.queries, BLOCK)]
    tops = x.whole.totals.max(torch.cat([row_maximum(score.detach()) for score, _ in parts], 2))
    mixed = []
    for (score, values), top in zip(parts, tops.split(BLOCK, 2), strict=True):
        weight = (score - top).exp()
        mixed.append(torch.cat([_mix(weight, values), weight.sum(-1, keepdim=True)], -1))
    joined = x.whole.totals.sum(torch.cat(mixed, 2)).narrow(2, x.whole.first_query, x.queries)
    return (joined[..., :-1] / positive(joined[..., -1:])).to(x.query.dtype)


def _choose(x: Inputs, whole: Inputs, count: int, comm: Communicator) -> tuple[Tensor, Tensor]:
    """The keys that queries choose, (B, Hq, N, .): this rank's own, negative for none, and the places of all."""
    first, seen = x.whole.first_key, before_block(whole)
    first_block = x.whole.totals.rows(x.key[:, :, : max(0, BLOCK - first)])
    codes = encode(x.key, Frame.of(first_block))
    level, sigma = codes.levels()[:, :, : x.keys], codes.sigma[:, :, : x.keys]
    query, place = rounded(whole.query, x.scale), torch.arange(x.keys, device=x.query.device) + first
    chosen = []
    for start in range(0, whole.queries, BLOCK):
        part = slice(start, start + BLOCK)
        score = scores(query[:, :, part], level, sigma).masked_fill(place >= seen[part, None], NONE)
        index = largest(score, min(count, x.keys))
        score = score.gather(-1, index.clamp_min(0).long()).masked_fill(index < 0, NONE)
        chosen.append((index, score.to(index.dtype)))
    index, score = (torch.cat(parts, 2) for parts in zip(*chosen, strict=True))
    offered = comm.all_gather_rows(torch.stack([score, index + first], -1).int().movedim(3, 0))
    of_all = torch.cat(offered).movedim(0, 3)
    kept = marked_largest(of_all[..., 0], count) & (of_all[..., 0] > NONE)
    places = of_all[..., 1].masked_fill(~kept, -1).long()
    before = sum(len(part) for part in offered[: comm.rank])
    return places[..., before : before + index.shape[-1]] - first, places


def _totals(x: Inputs) -> Tensor:
    """(B, Hkv, G + 1, D + Dv), float64: sums of all ranks' keys and values before each block and the end."""
    rows = torch.cat([x.key, x.value], -1).double()
    block = (torch.arange(x.keys, device=rows.device) + x.whole.first_key) // BLOCK
    zeros = rows.new_zeros((*rows.shape[:2], -(-x.whole.keys // BLOCK), rows.shape[3]))
    return pad(x.whole.totals.sum(zeros.index_add(2, block, rows)).cumsum(2), (0, 0, 1, 0))


def _scored(
    x: Inputs, whole: Inputs, chosen: Tensor, places: Tensor, means: RangeStandIns | None, start: int
) -> tuple[Tensor, list[Tensor]]:
    """The scores (B, Hq, M, keys) of the block of queries from `start` on, -inf for keys of other ranks, and the
    values: of the queries' own block, of chosen keys and of means.
    """
    stop, first, own = min(start + BLOCK, whole.queries), x.whole.first_key, x.whole.first_query
    rows, far, kept = (part[:, :, start:stop].unflatten(1, (x.kv_heads, -1)) for part in (whole.query, chosen, places))
    rows = rows * x.scale
    unchosen = (start, stop) if x.is_causal else (0, 0)  # the places of keys that queries see without choosing
    near = slice(*(min(max(0, edge - first), x.keys) for edge in unchosen))
    place, asking = torch.arange(x.keys, device=rows.device), torch.arange(start, stop, device=rows.device)
    late = place[near] + first > asking[:, None]
    at_least_one = (part if x.keys else pad(part, (0, 0, 0, 1)) for part in (x.key, x.value))
    key, value = (take(part, far.clamp_min(0)) for part in at_least_one)
    columns = [
        (rows @ x.key[:, :, None, near].mT).masked_fill(late, -torch.inf),
        (key @ rows.unsqueeze(-1)).squeeze(-1).masked_fill(far < 0, -torch.inf),
    ]
    values = [x.value[:, :, None, near], value]
    if means is not None:
        step = int(means.step(whole, start, start + 1))
        left = means.remaining(step, means.size[:, None, None, None, step], kept)
        elsewhere = (asking < own) | (asking >= own + x.queries)
        score = rows @ means.key[:, :, None, step].mT + left.clamp_min(1).log()
        columns.append(score.masked_fill((left <= 0) | elsewhere[:, None], -torch.inf))
        values.append(means.value[:, :, None, step])
    return torch.cat(columns, -1).flatten(1, 2), values


def _mix(weight: Tensor, values: Sequence[Tensor]) -> Tensor:
    """The sums (B, Hq, M, Dv) of the values of `_scored` under weights (B, Hq, M, keys)."""
    weight = weight.unflatten(1, (values[0].shape[1], -1))
    near, far, *means = weight.split([part.shape[-2] for part in values], -1)
    mixed = near @ values[0] + (far.unsqueeze(-2) @ values[1]).squeeze(-2)
    if means:
        mixed = mixed + means[0] @ values[2]
    return torch.flatten(mixed, 1, 2)
