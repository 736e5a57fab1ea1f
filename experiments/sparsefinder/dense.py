"""Dense 1.5-entmax attention in every layer by the `entmax` package: how the models here are trained."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from fewkeys.captures.capture import AttentionInputs
from fewkeys.integrations.interface import attach


@contextmanager
def dense_entmax(model: Any) -> Iterator[None]:
    """Answer every attention call of `model` with dense 1.5-entmax, with gradient, until the block ends."""
    from entmax import entmax15

    def answer(layer: int, module: nn.Module, inputs: AttentionInputs) -> Tensor:
        groups = inputs.query.shape[1] // inputs.key.shape[1]
        key, value = (rows.repeat_interleave(groups, 1) for rows in (inputs.key, inputs.value))
        scores = inputs.query @ key.mT * inputs.scale
        if inputs.key_mask is not None:
            scores = scores.masked_fill(~inputs.key_mask[:, None, None], -1e4)
        if inputs.is_causal:
            queries, keys = scores.shape[-2:]
            later = torch.ones(queries, keys, dtype=torch.bool).triu(1 + inputs.query_offset)
            scores = scores.masked_fill(later, -1e4)
        return entmax15(scores.float(), dim=-1).to(value.dtype) @ value

    detach = attach(model, answer).detach
    try:
        yield
    finally:
        detach()
