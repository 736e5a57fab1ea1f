"""Keys in two bits a dimension, which suffice to choose the keys with the largest scores.

With m the mean of a head's first block of keys, rho the root mean square of |k - m| over that block, D rounded up to a
power of two W (at least 16), H the Hadamard matrix of W rows and S a fixed diagonal of signs,

    k' = H S (k - m)      sigma^2 = mean_d k'_d^2      sigma_int = round(4096 sigma / rho), at most 2^15 - 1
    code_d = floor(k'_d / sigma), at least -2, at most 1         level_d = 2 code_d + 1

Rotated numbers of any key are nearly Gaussian, for which evenly spaced levels are best 0.996 sigma apart: multiples of
sigma / 2 serve all keys. A query is rotated, too, and rounded to integers from -10 to 10. Then

    score_j = (1024 / W sum_d query_d level_jd sigma_int_j + 2^14) >> 15

is q . (k_j - m) up to rounding and to a factor that the query's keys share: an integer of 16 bits. Keys more than 8 rho
from m count as if they were at 8. Sums in a fixed order, exact products and correctly rounded operations make every
implementation choose the same keys.

Source of tables of pairs in registers: fast scans (Andre et al., 2017). `KeyScan` names the others.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn.functional import pad

from fewkeys.core.precision import working
from fewkeys.core.work import at_once

BLOCK = 32
"""Keys of a block."""
LEVELS = 10
"""The largest integer of a rounded query: two pairs of products fit into a byte."""
LEAST_WIDE = 16
"""The least W: a block of codes fills the widest registers."""
UNIT = 4096
"""`sigma_int` of a key at distance rho from the middle."""
LARGEST_SIGMA = 2**15 - 1
NONE = -(2**15)
"""The score of a key that may not be chosen."""


@dataclass(frozen=True, eq=False)
class Codes:
    """The codes of keys (B, Hkv, N, D), N filled up to G blocks of 32; W / 4 + 2 bytes a key.

    `packed` (B, Hkv, G, W / 2, 16), uint8: 32 nibbles for every block and pair p of numbers. Bytes 0, 2, .. hold keys 0
    to 7 in their lower halves and 16 to 23 in the upper ones, bytes 1, 3, .. those from 8 and from 24 on; a nibble
    holds `code_2p + 2` and, two bits higher, `code_(2p+1) + 2`. `sigma` (B, Hkv, 32 G), int16: `sigma_int`.
    """

    packed: Tensor
    sigma: Tensor

    def levels(self) -> Tensor:
        """The levels (B, Hkv, 32 G, W), -3 to 3, as float32."""
        parts = self.packed.unflatten(-1, (8, 2))
        nibbles = torch.stack([parts & 15, parts >> 4], -4)  # (B, Hkv, G, 2, P, 8, 2)
        codes = torch.stack([nibbles & 3, nibbles >> 2], -1).movedim(-4, -2).transpose(-4, -3)  # (.., 2, 2, 8, P, 2)
        return codes.flatten(-2).flatten(2, 5).float() * 2 - 3


def width(dim: int) -> int:
    """W: the numbers that code a key of `dim`."""
    return max(LEAST_WIDE, 1 << (dim - 1).bit_length())


@lru_cache
def signs(dim: int, device: torch.device) -> Tensor:
    """The diagonal of S (W,), float32; zeros beyond `dim`."""
    drawn = torch.randint(2, (dim,), generator=torch.Generator("cpu").manual_seed(dim), device="cpu")
    # Kernels read float32, whatever the default dtype is at the first call.
    return pad(drawn.float() * 2 - 1, (0, width(dim) - dim)).to(device)


def rotated(rows: Tensor) -> Tensor:
    """H S x (..., W) of rows x (..., D), sqrt(W) times as long; sums in the kernels' order."""
    x = pad(rows, (0, width(rows.shape[-1]) - rows.shape[-1])) * signs(rows.shape[-1], rows.device)
    step = 1
    while step < x.shape[-1]:
        a, b = x.unflatten(-1, (-1, 2, step)).unbind(-2)
        x = torch.stack([a + b, a - b], -2).flatten(-3)
        step *= 2
    return x


@dataclass(frozen=True, eq=False)
class Frame:
    """`middle` (B, Hkv, 1, D), m, and `spread` (B, Hkv, 1), rho, of the first block of keys."""

    middle: Tensor
    spread: Tensor

    @staticmethod
    def of(key: Tensor, valid: Tensor | None = None) -> Frame:
        """The frame of keys (B, Hkv, N, D), those `valid` (B, N)."""
        first = working(key[:, :, :BLOCK].detach())
        real = torch.ones_like(first[..., :1]) if valid is None else valid[:, None, :BLOCK, None].to(first.dtype)
        count = real.sum(2, keepdim=True).clamp_min(1)
        middle = (first * real).sum(2, keepdim=True) / count
        square = ((first - middle).double().square() * real).sum((2, 3)) / count[..., 0, 0]
        return Frame(middle, square.sqrt().to(first.dtype).unsqueeze(-1))


def encode(key: Tensor, frame: Frame) -> Codes:
    """The codes of keys (B, Hkv, N, D). Cost O(N D log D)."""
    turned = rotated(working(key.detach()) - frame.middle)
    square = turned.double().square()
    while square.shape[-1] > 1:  # in the kernels' order
        square = torch.add(*square.chunk(2, -1))
    sigma = (square / turned.shape[-1]).sqrt().to(turned.dtype)
    code = (turned >= -sigma).byte() + (turned >= 0) + (turned >= sigma)
    # Keys at the middle have no size, also if all keys of the first block are (0 / 0).
    sigma_int = (sigma.squeeze(-1) * UNIT / frame.spread).round().nan_to_num(0.0).clamp_max(LARGEST_SIGMA).short()
    fill = -key.shape[2] % BLOCK
    pairs = pad(code, (0, 0, 0, fill)).unflatten(-1, (-1, 2))
    low, high = (pairs[..., 0] | pairs[..., 1] << 2).unflatten(2, (-1, 2, 2, BLOCK // 4)).unbind(3)
    packed = (low | high << 4).permute(0, 1, 2, 5, 4, 3).flatten(-2)
    return Codes(packed.contiguous(), pad(sigma_int, (0, fill)))


def rounded(query: Tensor, scale: float = 1.0) -> Tensor:
    """Queries (B, Hq, Nq, D) as integers (B, Hq, Nq, W), int8, with the sign of the scale."""
    turned = rotated(working(query.detach()))
    largest = turned.abs().amax(-1, keepdim=True).clamp_min(torch.finfo(turned.dtype).tiny)
    whole = (turned / largest * (LEVELS if scale > 0 else -LEVELS)).round()
    return whole.nan_to_num(0.0).to(torch.int8)


def best(codes: Codes, query: Tensor, seen: Tensor, real: Tensor | None, count: int) -> Tensor:
    """The places (B, Hq, Nq, K) of the K = `count` best keys of every query, int32, ascending, -1 for none at the end.

    query: `rounded`; seen (Nq,), ascending: query i chooses among the first `seen_i` keys, those `real` (B, N). Of
    equal scores the first keys are kept. Cost O(Nq N D), memory O(Nq count + N D).
    """
    (batch, heads, queries, _), keys = query.shape, int(seen[-1])
    level, index = codes.levels(), []
    step = max(1, min(BLOCK, at_once(query) // (batch * heads * max(1, keys))))
    for start in range(0, queries, step):
        part = slice(start, start + step)
        most = int(seen[part][-1])
        rows = query[:, :, part].unflatten(1, (level.shape[1], -1)).float()
        total = rows.flatten(2, 3) @ level[:, :, :most].mT * (1024 / query.shape[3])
        score = total.round().int() * codes.sigma[:, :, None, :most] + 2**14 >> 15
        score = score.unflatten(2, rows.shape[2:4]).flatten(1, 2)
        hidden = (torch.arange(most, device=query.device) >= seen[part, None])[None, None]
        if real is not None:
            hidden = hidden | ~real[:, None, None, :most]
        index.append(largest(score.masked_fill(hidden, NONE), min(count, keys)).int())
    return torch.cat(index, 2)


def largest(score: Tensor, count: int) -> Tensor:
    """The places of the `count` largest scores (..., N), ascending, the first of equal ones; -1 for `NONE`."""
    keys = score.shape[-1]
    if not keys:
        return score.new_full((*score.shape[:-1], count), -1)
    least = score.topk(min(count, keys), -1, sorted=False).values.amin(-1, keepdim=True)
    above, equal = score > least, (score == least) & (least > NONE)
    kept = above | (equal & (equal.cumsum(-1) <= count - above.sum(-1, keepdim=True)))
    number = (kept.cumsum(-1) - 1).masked_fill(~kept, count)
    place = torch.arange(keys, device=score.device).expand_as(number)
    index = place.new_full((*score.shape[:-1], count + 1), -1)
    return index.scatter_(-1, number, place)[..., :count]
