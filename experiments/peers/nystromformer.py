"""Nystromformer: attention through segment means of queries and keys. Our implementation after the paper.

    O = softmax(Q K~^T) softmax(Q~ K~^T)^+ softmax(Q~ K^T) V,

Q~ and K~ the means of `landmarks` segments of the sequence, the pseudo-inverse by the paper's iteration of matrix
products. The convolution beside it belongs to training and is left out. Cost O(n m D + m^3).

Source: Xiong et al., "Nystromformer" (arXiv 2102.03902), equations 11 to 13.
"""

from __future__ import annotations

from itertools import product
from typing import Any

import torch
from experiments.peers.parts import averages, check_encoder
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention


def attend(
    q: Tensor, k: Tensor, v: Tensor, *, scale: float, is_causal: bool, generator: torch.Generator,
    landmarks: int, iterations: int = 6,
) -> Tensor:  # fmt: skip
    """Attention through `landmarks` means; the paper has six iterations."""
    check_encoder(is_causal)
    few_q, few_k = segments(q, landmarks), segments(k, landmarks)
    core = (scale * few_q @ few_k.mT).softmax(-1)
    inner = inverse(core, iterations) @ scaled_dot_product_attention(few_q, k, v, scale=scale)
    return scaled_dot_product_attention(q, few_k, inner, scale=scale)


def segments(x: Tensor, count: int) -> Tensor:
    """The means (B, H, count, D) of contiguous segments of nearly equal size."""
    segment = (torch.arange(x.shape[2]) * count // x.shape[2]).expand(x.shape[:3])
    return averages(x, segment, count)[0]


def inverse(core: Tensor, iterations: int) -> Tensor:
    """The Moore-Penrose inverse of a matrix of softmax rows, by an iteration of third order."""
    eye = torch.eye(core.shape[-1])
    inverted = core.mT / (core.abs().sum(-2).amax(-1) * core.abs().sum(-1).amax(-1))[..., None, None]
    for _ in range(iterations):
        both = core @ inverted
        inverted = 0.25 * inverted @ (13 * eye - both @ (15 * eye - both @ (7 * eye - both)))
    return inverted


def grid(queries: int, keys: int, dim: int) -> list[dict[str, Any]]:
    """The settings to search."""
    sizes = [landmarks for landmarks in (16, 32, 64, 128, 256) if landmarks <= keys // 2]
    return [{"landmarks": landmarks, "iterations": more} for landmarks, more in product(sizes, (6, 12))]
