"""Scores of all keys from two bits a number, with errors of known size whatever the keys are.

The rotation of `fewkeys.sketch.codes` is fixed, so there are keys that it hides. Here keys are rotated first by a
uniform orthogonal matrix Q, drawn for this call: k' = H S Q (k - m). The multiple of the code's levels whose error is
at right angles to k' stands for the key (RaBitQ: Gao and Long, 2024),

    coded = levels |k'|^2 / (k' . levels)      rest = k' - coded

For any fixed key and query, the direction of the query beside the key is uniform, and so

    q . (k_j - m) = q' . coded_j / W + e_j      e_j ~ N(0, d_j^2), about, with d_j = |q| |rest_j| / sqrt(W (D - 1))

at most. E[exp(2 q . k)]^(1/2) is then at most exp(q . m + q' . coded / W + d^2): the variance of a sampled sum is least
where keys are drawn in proportion to it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fewkeys.core.precision import working
from fewkeys.sketch.codes import Frame, encode, rotated, width


@dataclass(frozen=True, eq=False)
class RandomCodes:
    """`turn`: Q (D, D); `middle`: Q m (B, Hkv, 1, D); `coded` / W (B, Hkv, N, W); `rest`: d / |q| (B, Hkv, N)."""

    turn: Tensor
    middle: Tensor
    coded: Tensor
    rest: Tensor

    @staticmethod
    def of(key: Tensor, valid: Tensor | None, generator: torch.Generator) -> RandomCodes:
        """The codes of keys (B, Hkv, N, D). Cost O(N D^2)."""
        dim = key.shape[3]
        normal = torch.randn(dim, dim, generator=generator, dtype=torch.float64, device=generator.device)
        turn, triangle = torch.linalg.qr(normal)
        # Without the signs the distribution would depend on how the factors are computed.
        turn = (turn * triangle.diagonal().sign()).to(working(key[:0]))
        key = working(key) @ turn
        frame = Frame.of(key, valid)
        levels = encode(key, frame).levels()[:, :, : key.shape[2]].to(key.dtype)
        whole = rotated(key - frame.middle)
        # The factor of a key that is the middle is zero.
        along = (whole * levels).sum(-1, keepdim=True).clamp_min(torch.finfo(key.dtype).tiny)
        coded, wide = levels * (whole.square().sum(-1, keepdim=True) / along), width(dim)
        rest = (whole - coded).norm(dim=-1) / (wide * max(1, dim - 1)) ** 0.5
        return RandomCodes(turn, frame.middle, coded / wide, rest)

    def log_weights(self, query: Tensor) -> Tensor:
        """The logarithm (B, Hkv, M, N) of the root mean square of `exp(q_i . k_j)`, for queries (B, Hkv, M, D)."""
        query = query @ self.turn
        score = rotated(query) @ self.coded.mT + query @ self.middle.mT
        log: Tensor = score + (query.norm(dim=-1, keepdim=True) * self.rest.unsqueeze(-2)).square()
        return log
