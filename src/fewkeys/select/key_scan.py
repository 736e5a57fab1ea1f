"""Each query's own keys, chosen by the codes of all keys."""

from dataclasses import dataclass
from functools import cached_property
from math import log2

import torch
from torch import Tensor

from fewkeys.core.graph import Graph, marked
from fewkeys.core.impl import COMPILED, Impl
from fewkeys.core.inputs import Inputs
from fewkeys.core.work import Work
from fewkeys.native.kernels import LARGEST_CODED, best_codes, code_keys
from fewkeys.native.tensors import readable
from fewkeys.select.base import CountedSelector, Remembered
from fewkeys.sketch.codes import BLOCK, Codes, Frame, best, encode, rounded, signs, width

PER_CODE = 0.25
"""Operations of scanning one number of a coded key, counted like multiplications and additions."""


@dataclass(frozen=True)
class KeyScan(CountedSelector):
    """The query's own block of 32 keys up to itself, and the `count` best of the keys before it, by their codes.

    Every query head scores all keys before the query's block in two bits a number (`fewkeys.sketch.codes`):
    `score_j ~ q . (k_j - m)`, of equal scores the first. Blocks are of absolute positions, 0 .. 31 the first. Strictly
    causal: a code depends on its key and on the mean m of the first block alone. Without causality all keys are scored,
    and there is no own block.

    Kept: count + 16.5 keys on average over a block of queries. Cost O(n (D log D + count (D + Dv) + n D / 8)): the scan
    reads 18 bytes a key of 64 dimensions, not 512. Sources: RaBitQ (Gao and Long, SIGMOD 2024)
    and TurboQuant (Zandieh et al., 2025) for codes after a random rotation; Loki, PQCache, MagicPIG and HashAttention
    scan cheap scores, too.
    """

    causal = True

    def select(self, inputs: Inputs) -> Graph:
        x = inputs
        codes = x.remember("codes", lambda: codes_of(x.key, Frame.of(x.key, x.valid), x.impl))
        return Graph(x, scan=Scanned(x, codes, self.count))

    @property
    def remembered(self) -> Remembered:
        return Remembered(scan=self.count)

    def covers(self, inputs: Inputs) -> bool:
        return self.count >= _before_last(inputs)

    def work(self, inputs: Inputs) -> Work:
        x, wide = inputs, width(inputs.head_dim)
        seen = x.keys * (0.5 if x.is_causal and not x.offset else 1.0)
        rotating = 2.0 * wide * log2(wide) * (1 + x.gqa_ratio)
        kept = self.count + (BLOCK + 1) / 2 * x.is_causal
        return Work(kept, choosing=rotating, scanned=PER_CODE * x.head_dim * seen)


def codes_of(key: Tensor, frame: Frame, impl: Impl) -> Codes:
    """The codes of keys (B, Hkv, N, D); the compiled kernel gives the same bits."""
    if impl in COMPILED and readable(key.detach()) and key.shape[3] <= LARGEST_CODED:
        sign = signs(key.shape[3], key.device)
        return Codes(*code_keys(key.detach(), sign, frame.middle, frame.spread))
    return encode(key, frame)


def _before_last(inputs: Inputs) -> int:
    """How many keys the last query scans."""
    x = inputs
    return min(x.keys, (x.offset + x.queries - 1) // BLOCK * BLOCK) if x.is_causal else x.keys


@dataclass(frozen=True, eq=False)
class Scanned:
    """The edges of `KeyScan`. `scale` (B, Hkv, Nk, 2): the factors of keys and values held in int8."""

    inputs: Inputs
    codes: Codes
    count: int
    scale: Tensor | None = None

    @cached_property
    def seen(self) -> Tensor:
        """(Nq,): how many keys stand before each query's own block; all, without causality."""
        x = self.inputs
        position = torch.arange(x.offset, x.offset + x.queries, device=x.query.device)
        return position.bitwise_and_(-BLOCK).clamp_max_(x.keys) if x.is_causal else position.fill_(x.keys)

    @cached_property
    def most(self) -> int:
        return min(self.count, _before_last(self.inputs))

    @cached_property
    def index(self) -> Tensor:
        """(B, Hq, Nq, most), int32: the chosen keys, ascending, -1 for none at the end."""
        x = self.inputs
        packed, sigma, query = self.codes.packed, self.codes.sigma, x.query.detach()
        if x.impl in COMPILED and readable(packed, sigma, query, x.valid) and x.head_dim <= LARGEST_CODED:
            return best_codes(packed, sigma, query, self.sign, self.seen, x.valid, self.most)
        return best(self.codes, rounded(query, x.scale), self.seen, x.valid, self.most)

    @property
    def sign(self) -> Tensor:
        """(W,): the signs by which kernels multiply queries, times the sign of the scale."""
        sign = signs(self.inputs.head_dim, self.inputs.query.device)
        return sign if self.inputs.scale > 0 else -sign

    def mask(self, start: int, stop: int) -> Tensor:
        """As `Graph.mask`."""
        x = self.inputs
        near = torch.arange(x.keys, device=x.key.device) >= self.seen[start:stop, None]
        index = self.index[:, :, start:stop].long()
        return (marked(index.clamp_min(0), index >= 0, x.keys) > 0) | near
