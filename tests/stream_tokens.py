"""Tokens for streams of two sequences, and what attention on the whole of them gives."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from hypothesis import strategies as st

import fewkeys as fk

TOKENS = 420


@dataclass(frozen=True, eq=False)
class Tokens:
    """The tokens of two sequences: query (2, 4, N, D), key (2, 2, N, D), value (2, 2, N, Dv), real (2, N)."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    real: torch.Tensor

    @staticmethod
    def draw(seed, padding=0.0, count=TOKENS):
        g = torch.Generator().manual_seed(seed)
        q, k, v = (torch.randn(2, h, count, d, generator=g, dtype=torch.float64) for h, d in ((4, 8), (2, 8), (2, 5)))
        return Tokens(3 * q, k, v, torch.rand(2, count, generator=g) >= padding)

    def __getitem__(self, part):
        return Tokens(self.query[:, :, part], self.key[:, :, part], self.value[:, :, part], self.real[:, part])

    def __add__(self, other):
        parts = ((self.query, other.query, 2), (self.key, other.key, 2), (self.value, other.value, 2))
        return Tokens(*(torch.cat(part[:2], part[2]) for part in (*parts, (self.real, other.real, 1))))

    def select(self, index):
        return Tokens(*(rows[index] for rows in (self.query, self.key, self.value, self.real)))

    def feed(self, stream):
        stream.append(self.key, self.value, self.real)
        return stream.attend(self.query)


def whole(plan, tokens):
    """Attention on the whole of each sequence, without its padding."""
    output = torch.zeros(*tokens.query.shape[:3], tokens.value.shape[3], dtype=tokens.value.dtype)
    for row, real in enumerate(tokens.real):
        if not real.any():
            continue
        real_rows = (rows[row : row + 1, :, real] for rows in (tokens.query, tokens.key, tokens.value))
        output[row : row + 1, :, real] = fk.attention(*real_rows, plan=plan, is_causal=True, impl="torch")
    return output


def same(actual, want):
    torch.testing.assert_close(actual, want, rtol=1e-8, atol=1e-10)


SIZES = st.lists(st.one_of(st.just(1), st.integers(1, 140)), min_size=1, max_size=14)
