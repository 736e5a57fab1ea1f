"""Plans whose queries choose keys by their codes, some queries of a block at a time.

Memory O(n (D + Dv)) beside the lists; gradients store all gathered rows as well.
"""

from collections.abc import Callable
from itertools import pairwise

import torch
from torch import Tensor

from fewkeys.core.graph import Graph
from fewkeys.core.precision import working, working_dtype
from fewkeys.core.rows import take
from fewkeys.core.weights import positive
from fewkeys.core.work import at_once
from fewkeys.execute.problem import Problem
from fewkeys.execute.torch.sources import assembled
from fewkeys.rest.base import RangeStandIns
from fewkeys.select.key_scan import Scanned
from fewkeys.sketch.codes import BLOCK


def only_scan(graph: Graph) -> Scanned | None:
    """The scan of a graph that holds no other edges, else None."""
    is_alone = all(other is None for other in (graph.band, graph.columns, graph.rows, graph.extra))
    scan: Scanned | None = graph.scan if is_alone else None
    return scan


def attend(problem: Problem, scanned: Scanned) -> Tensor:
    """The output (B, Hq, Nq, Dv). Cost O(n slots (D + Dv))."""
    x, s = problem.inputs, problem.stand_ins
    query, key, value = x.grouped_query().flatten(0, 1), x.key.flatten(0, 1), x.value.flatten(0, 1)
    scale = None if scanned.scale is None else scanned.scale.flatten(0, 1).to(working_dtype(x.query.dtype))
    index = scanned.index.unflatten(1, (x.kv_heads, x.gqa_ratio)).flatten(0, 1)

    def read(part: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
        keys, values = working(part(key)), working(part(value))
        return (keys, values) if scale is None else (keys * part(scale)[..., :1], values * part(scale)[..., 1:])

    def of_block(heads: slice, start: int, stop: int) -> Tensor:
        """The output (H, gqa_ratio, M, Dv) of the queries start .. stop - 1 of one block."""
        rows = working(query[heads, :, start:stop]).flatten(1, 2) * x.scale
        first = int(scanned.seen[start])  # of the keys of the queries' own block
        last = min(x.keys, stop + x.offset) if x.is_causal else first
        near, far = slice(first, last), index[heads, :, start:stop].flatten(1, 2).long()
        chosen = far.clamp_min(0)
        keys, values = read(lambda part: take(part[heads], chosen))
        near_keys, near_values = read(lambda part: part[heads, near])
        position = torch.arange(start, stop, device=far.device) + x.offset
        hidden = torch.arange(first, last, device=far.device) > position[:, None]
        hidden = hidden.repeat(x.gqa_ratio, 1).expand(len(rows), -1, -1)
        if x.valid is not None:
            hidden = hidden | ~x.valid.repeat_interleave(x.kv_heads, 0)[heads, near].unsqueeze(1)
        scores = [
            (rows @ near_keys.mT).masked_fill(hidden, -torch.inf),
            (keys @ rows.unsqueeze(-1)).squeeze(-1).masked_fill(far < 0, -torch.inf),
        ]
        if isinstance(s, RangeStandIns):
            step = int(s.step(x, start, start + 1))
            mean_keys, mean_values = (part.flatten(0, 1)[heads, step] for part in (s.key, s.value))
            size = s.size[:, step].repeat_interleave(x.kv_heads, 0)[heads, None]
            left = s.remaining(step, size, far)
            scores.append((rows @ mean_keys.mT).masked_fill(left <= 0, -torch.inf))
        (joined,) = problem.weights.kernel([torch.cat(scores, -1)])  # one part: each of them may be empty
        weight = joined.split([part.shape[-1] for part in scores], -1)
        mixed = weight[0] @ near_values + (weight[1].unsqueeze(-2) @ values).squeeze(-2)
        total = weight[0].sum(-1, keepdim=True) + weight[1].sum(-1, keepdim=True)
        if isinstance(s, RangeStandIns):
            of_means = weight[2] * left
            mixed, total = mixed + of_means @ mean_values, total + of_means.sum(-1, keepdim=True)
        return torch.unflatten(mixed / positive(total), 1, (x.gqa_ratio, -1))

    each = x.gqa_ratio * (scanned.most + 1) * (x.head_dim + x.value_dim)
    heads = max(1, at_once(x.query) // (each * min(BLOCK, x.queries)))
    starts = [0, *range(BLOCK - x.offset % BLOCK, x.queries, BLOCK)]
    return assembled(x, heads, [*pairwise([*starts, x.queries])], of_block)
