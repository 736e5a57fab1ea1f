"""A small encoder of bytes that is trained to predict hidden words."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, gelu, scaled_dot_product_attention

import fewkeys as fk

HIDDEN, SYMBOLS = 256, 257
"""The symbol of a hidden byte, after all bytes."""
BASE = 10_000.0
SHARE = 0.15


def attend(query: Tensor, key: Tensor, value: Tensor, plan: fk.Plan | None) -> Tensor:
    """Attention by the plan, forward and backward; torch's fused attention without a plan."""
    if plan is None:
        return scaled_dot_product_attention(query, key, value)
    return fk.attention(query, key, value, plan=plan)


class Layer(nn.Module):
    """Attention and a perceptron, each with a norm before it and a residual; rotary positions."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.into, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor, turn: tuple[Tensor, Tensor], plan: fk.Plan | None) -> Tensor:
        query, key, value = self.into(self.before(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        attended = attend(rotated(query, turn), rotated(key, turn), value, plan)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        output: Tensor = x + self.down(gelu(self.up(self.between(x))))
        return output


class Encoder(nn.Module):
    """Logits (B, N, 256) of the bytes at every place of symbols (B, N)."""

    def __init__(self, width: int, heads: int, layers: int, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.head_dim = width // heads
        self.embedding = nn.Embedding(SYMBOLS, width)
        self.layers = nn.ModuleList(Layer(width, heads) for _ in range(layers))
        self.norm, self.read = nn.LayerNorm(width), nn.Linear(width, 256)
        for weight in self.parameters():
            if weight.ndim == 2:
                nn.init.normal_(weight, std=weight.shape[1] ** -0.5)

    def forward(self, symbols: Tensor, plan: fk.Plan | None) -> Tensor:
        x, turn = self.embedding(symbols), angles(symbols.shape[1], self.head_dim)
        for layer in self.layers:
            x = layer(x, turn, plan)
        logits: Tensor = self.read(self.norm(x))
        return logits


def angles(length: int, dim: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines (N, dim / 2) of the rotary embedding."""
    speed = BASE ** -torch.arange(0, 1, 2 / dim)
    angle = torch.arange(length)[:, None] * speed
    return angle.cos(), angle.sin()


def rotated(rows: Tensor, turn: tuple[Tensor, Tensor]) -> Tensor:
    """Rows (B, H, N, D), each pair of numbers rotated by the angle of its position."""
    (cosine, sine), (left, right) = turn, rows.chunk(2, -1)
    return torch.cat([left * cosine - right * sine, left * sine + right * cosine], -1)


def hidden(text: Tensor, generator: torch.Generator) -> Tensor:
    """Bytes (B, N) with about `SHARE` of the words, and the blank before each, hidden."""
    word = (text == ord(" ")).cumsum(-1)
    chosen = torch.rand(text.shape[0], text.shape[1] + 1, generator=generator) < SHARE
    return torch.where(chosen.gather(1, word), HIDDEN, text)


def loss(model: Encoder, text: Tensor, symbols: Tensor, plan: fk.Plan | None) -> Tensor:
    """Mean negative log likelihood of the hidden bytes, in nats."""
    masked = symbols == HIDDEN
    return cross_entropy(model(symbols, plan)[masked], text[masked])
