"""Equal blocks along the order of an angular hash."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from experiments.sparsefinder.baselines.draws import normal
from torch import Tensor

from fewkeys.core.graph import Graph
from fewkeys.core.inputs import Inputs
from fewkeys.core.validation import check_count
from fewkeys.core.work import Work
from fewkeys.papers.sparsefinder.groups import Groups
from fewkeys.papers.sparsefinder.space import Projection, check_space, projected, space_work
from fewkeys.select.base import Selector


@dataclass(frozen=True)
class SortedLSH(Selector, listed=True):
    """Queries and keys are sorted by a hash and split into equal blocks; block b of queries sees block b of keys.

    The hash is the signs of `planes` random projections, ordered along the Gray code, so that neighbouring buckets
    differ in one sign; equal hashes stay in the order of their positions. Of n real keys there are
    `m = ceil(n / size)` blocks; a query of rank r among N sees the keys whose rank times m / n rounds down to the same
    block as `r m / N`. The planes come from the call's generator, the same for all sequences and heads.

    HyperAttention is this beside `rest=UniformSample(count)`. Not causal: ranks depend on later tokens, and the paper's
    recursion over halves of the sequence sorts each half as a whole.

    Args:
        size: the most keys in a block.
        planes: hyperplanes of the hash; 7 in the paper's code.
        project: the space in which q and k are hashed; None: as they are.

    Cost O(n (D planes + log n + size D)).

    Source: Han, Jayaram, Karbasi, Mirrokni, Woodruff, Zandieh, HyperAttention (arXiv 2310.05869), section 2 and
    definition 1.
    """

    size: int
    planes: int = 7
    project: Projection | None = None

    def __post_init__(self) -> None:
        check_count("SortedLSH size", self.size)
        if check_count("SortedLSH planes", self.planes) > 62:
            raise ValueError(f"SortedLSH planes: expected at most 62, the bits of a hash, got {self.planes}; lower it")
        check_space(self.project)

    @property
    def causal(self) -> bool:
        return False

    def select(self, inputs: Inputs) -> Graph:
        x = inputs
        query, key = projected(x, self.project)
        planes = normal(x, (query.shape[-1], self.planes), query)
        total = torch.full((x.batch,), x.keys, device=key.device) if x.valid is None else x.valid.sum(-1)
        blocks = ((total + self.size - 1) // self.size)[:, None, None]
        query, key = (_block(rows, planes, real, blocks) for rows, real in ((query, x.valid_queries), (key, x.valid)))
        return Graph(x, extra=Groups(query.unsqueeze(-1), key.unsqueeze(-1), -(-x.keys // self.size)))

    def covers(self, inputs: Inputs) -> bool:
        return self.size >= inputs.keys

    def work(self, inputs: Inputs) -> Work:
        rank, prepare = space_work(inputs, self.project)
        return Work(float(min(self.size, inputs.keys)), prepare + 4.0 * rank * self.planes * inputs.gqa_ratio)


def gray_rank(rows: Tensor, planes: Tensor) -> Tensor:
    """The place (..., N) of rows (..., N, r) among the 2^planes sign patterns in the order of the Gray code."""
    # From Gray code to binary: every digit is the parity of those before it.
    digits = (rows @ planes > 0).cumsum(-1) % 2
    return (digits << torch.arange(planes.shape[-1] - 1, -1, -1, device=rows.device)).sum(-1)


def _block(rows: Tensor, planes: Tensor, real: Tensor | None, blocks: Tensor) -> Tensor:
    """The block (B, H, N) of every real row, -1 for the others, of `blocks` (B, 1, 1)."""
    code, total = gray_rank(rows, planes), rows.shape[2]
    if real is None:
        return code.argsort(dim=-1, stable=True).argsort(-1) * blocks // total
    code = code.masked_fill(~real[:, None], 2**62)
    place = code.argsort(dim=-1, stable=True).argsort(-1) * blocks // real.sum(-1).clamp_min(1)[:, None, None]
    return place.masked_fill(~real[:, None], -1)
