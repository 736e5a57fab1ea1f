"""Keys in two bits a number: enough to tell which of them a query looks at.

With m the mean of a head's first block of keys, R a fixed rotation and sigma^2 the mean of the squares of a key's
numbers after it,

    k' = (k - m) R        code_d = floor(k'_d / sigma), at least -2, at most 1        level_d = 2 code_d + 1

After the rotation a key's numbers are nearly Gaussian whatever the key was, so four levels, -3, -1, 1 and 3 times
sigma / 2, serve all of them: for a Gaussian, evenly spaced levels are best where they are 0.996 sigma apart. Nothing is
learned, and a key's code depends on the key and m alone. A query is rotated, too, and rounded to integers from -10 to
10. Then

    score_j = sigma_j sum_d query_d level_jd

is q . (k_j - m) up to a factor that the query's keys share and to rounding. The sum is of integers: it is exact in
whatever order it is added, so all code that scans the same codes finds the same keys, to the last bit.

The idea of a random rotation before scalar codes is RaBitQ's (Gao and Long, SIGMOD 2024) and TurboQuant's (Zandieh et
al., 2025); tables of pairs in registers are those of fast scans (Andre et al., 2017).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn.functional import pad

from fewkeys.core.inputs import Inputs
from fewkeys.core.precision import working

BLOCK = 32
"""Keys that are coded, and forgotten by the window of a query, together."""
LEVELS = 10
"""Queries are rounded to integers of at most this: two pairs of products still fit into a byte."""
PAIRS = 8
"""Pairs of numbers are filled up to a multiple of this: two of the widest registers look up as many."""
PIECE = 2**22
"""Scores held at a time (16 MB)."""


@dataclass(frozen=True, eq=False)
class Codes:
    """The codes of keys (B, Hkv, N, D), N filled up to G blocks of 32.

    `packed` (B, Hkv, G, P, 16), uint8: of every block and pair of numbers 32 nibbles. Bytes 0, 2, .. hold the keys 0 to
    7 in their lower halves and 16 to 23 in the upper ones, bytes 1, 3, .. those from 8 and from 24 on; a nibble holds
    `code_2p + 2` and, two bits higher, that of 2p + 1.
    `sigma` (B, Hkv, 32 G), float32. Bytes: D / 4 + 4 for every key.
    """

    packed: Tensor
    sigma: Tensor

    def levels(self, dim: int) -> Tensor:
        """The levels (B, Hkv, 32 G, D), -3 to 3, as float32."""
        parts = self.packed.unflatten(-1, (8, 2))
        nibbles = torch.stack([parts & 15, parts >> 4], -4)  # (B, Hkv, G, 2, P, 8, 2)
        codes = torch.stack([nibbles & 3, nibbles >> 2], -1).movedim(-4, -2).transpose(-4, -3)  # (.., 2, 2, 8, P, 2)
        return codes.flatten(-2).flatten(2, 5)[..., :dim].float() * 2 - 3


@lru_cache
def rotation(dim: int) -> Tensor:
    """A fixed rotation (D, D), float64: a Hadamard matrix under signs where D is a power of two, else a drawn one."""
    generator = torch.Generator("cpu").manual_seed(dim)
    if dim & (dim - 1):
        drawn = torch.randn(dim, dim, generator=generator, dtype=torch.float64, device="cpu")
        orthogonal: Tensor = torch.linalg.qr(drawn).Q.contiguous()
        return orthogonal
    found = torch.ones(1, 1, dtype=torch.float64, device="cpu")
    while len(found) < dim:
        found = torch.cat([torch.cat([found, found], 1), torch.cat([found, -found], 1)])
    sign = torch.randint(2, (dim, 1), generator=generator, device="cpu") * 2 - 1
    signed: Tensor = sign * found / dim**0.5
    return signed


def _rotated(rows: Tensor) -> Tensor:
    return rows @ rotation(rows.shape[-1]).to(rows)


def middle(inputs: Inputs) -> Tensor:
    """m, (B, Hkv, 1, D): the mean of the real keys of the first block, which every query that needs codes has seen."""
    first = working(inputs.key[:, :, :BLOCK].detach())
    if inputs.valid is None:
        return first.mean(2, keepdim=True)
    real = inputs.valid[:, None, :BLOCK, None]
    return (first * real).sum(2, keepdim=True) / real.sum(2, keepdim=True).clamp_min(1)


def encode(key: Tensor, middle: Tensor) -> Codes:
    """The codes of keys (B, Hkv, N, D) around `middle` (B, Hkv, 1, D). Cost O(N D^2)."""
    turned = _rotated(working(key.detach()) - middle)
    sigma = turned.square().mean(-1, keepdim=True).sqrt()
    code = ((turned / sigma.clamp_min(torch.finfo(sigma.dtype).tiny)).floor().clamp(-2, 1) + 2).to(torch.uint8)
    keys, dim = key.shape[2:]
    fill, wide = -keys % BLOCK, -dim % (2 * PAIRS)
    pairs = pad(code, (0, wide, 0, fill)).unflatten(-1, (-1, 2))
    low, high = (pairs[..., 0] | pairs[..., 1] << 2).unflatten(2, (-1, 2, 2, BLOCK // 4)).unbind(3)
    packed = (low | high << 4).permute(0, 1, 2, 5, 4, 3).flatten(-2)
    return Codes(packed.contiguous(), pad(sigma.squeeze(-1), (0, fill)).float())


def rounded(query: Tensor, scale: float = 1.0) -> Tensor:
    """Scaled queries (B, Hq, Nq, D) as integers of at most `LEVELS`, int8. Cost O(Nq D^2)."""
    turned = _rotated(working(query.detach()) * scale)
    largest = turned.abs().amax(-1, keepdim=True).clamp_min(torch.finfo(turned.dtype).tiny)
    return (turned / largest * LEVELS).round().to(torch.int8)


def best(codes: Codes, query: Tensor, seen: Tensor, real: Tensor | None, count: int) -> Tensor:
    """The places (B, Hq, Nq, K) of the K = `count` best keys of every query, int32, ascending, -1 for none at the end.

    query: `rounded`; seen (Nq,), ascending: query i chooses among the first `seen_i` keys, those that are `real`
    (B, N). Of equal scores the first keys are kept. Cost O(Nq N D), memory O(Nq count + N D).
    """
    batch, heads, queries, dim = query.shape
    kv_heads = codes.sigma.shape[1]
    level, by_head = codes.levels(dim), query.unflatten(1, (kv_heads, -1))
    count = min(count, int(seen[-1]))
    found = query.new_empty((batch, heads, queries, count), dtype=torch.int32)
    start = 0
    while start < queries:
        most = max(1, int(seen[min(start + BLOCK, queries) - 1]))
        stop = min(queries, start + max(1, min(BLOCK, PIECE // (batch * heads * most))))
        most = int(seen[stop - 1])
        score = by_head[:, :, :, start:stop].float().flatten(2, 3) @ level[:, :, :most].mT
        score = (score * codes.sigma[:, :, None, :most]).unflatten(2, (-1, stop - start)).flatten(1, 2)
        place = torch.arange(most, device=query.device)
        hidden = (place >= seen[start:stop, None])[None, None]
        if real is not None:
            hidden = hidden | ~real[:, None, None, :most]
        found[:, :, start:stop] = _largest(score.masked_fill(hidden, -torch.inf), count)
        start = stop
    return found


def _largest(score: Tensor, count: int) -> Tensor:
    """The places of the `count` largest (..., N), ascending, of equal ones the first; -1 for those that are -inf."""
    keys = score.shape[-1]
    if not keys:
        return score.new_full((*score.shape[:-1], count), -1)
    least = score.topk(min(count, keys), -1, sorted=False).values.amin(-1, keepdim=True)
    above, equal = score > least, (score == least) & (least > -torch.inf)
    room = count - above.sum(-1, keepdim=True)
    kept = above | (equal & (equal.cumsum(-1) <= room))
    number = (kept.cumsum(-1) - 1).masked_fill(~kept, count)
    place = torch.arange(keys, device=score.device).expand_as(number)
    found = place.new_full((*score.shape[:-1], count + 1), -1)
    return found.scatter_(-1, number, place)[..., :count]
