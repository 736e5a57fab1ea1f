"""Sequences laid end to end in one row, as flash attention takes them: each attends to itself alone.

`cu_seq_lens_q`, as sentence-transformers and transformers' `DataCollatorWithFlattening` write it, holds where sequences
begin, and the number of all tokens last. Here each gets a row of its own, padded at its end.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fewkeys.captures.capture import AttentionInputs

NAMES = {"cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx"}
"""The arguments of packed sequences; only the first is read."""


def real_tokens(inputs: AttentionInputs, arguments: Mapping[str, Any]) -> Tensor | None:
    """Where the tokens of the one row go in rows of their own (B, longest); None: no call of several sequences."""
    starts = arguments.get("cu_seq_lens_q")
    if starts is None or len(starts) <= 2:
        return None
    lengths, tokens = starts.diff(), inputs.query.shape[2]
    whole = inputs.query.shape[0] == 1 and inputs.key.shape[2] == tokens == int(starts[-1]) and int(starts[0]) == 0
    if not whole or bool((lengths < 0).any()) or inputs.key_mask is not None or inputs.distance_bias is not None:
        raise ValueError(
            f"cu_seq_lens_q: expected places from 0 to the {tokens} tokens of one row, with neither padding nor a bias "
            f"of the distance, got {starts.tolist()} for {inputs.query.shape[0]} rows; give each sequence its own row "
            "and pad by attention_mask"
        )
    real: Tensor = torch.arange(int(lengths.max()), device=starts.device) < lengths[:, None]
    return real


def in_rows(inputs: AttentionInputs, real: Tensor) -> AttentionInputs:
    """The call with a row for each sequence."""
    query, key, value = (_spread(tokens, real) for tokens in (inputs.query, inputs.key, inputs.value))
    return replace(inputs, query=query, key=key, value=value, key_mask=None if bool(real.all()) else real)


def in_one_row(output: Tensor, real: Tensor) -> Tensor:
    """The output (1, H, N, Dv) of the outputs (B, H, longest, Dv) in rows of their own."""
    return output.transpose(1, 2)[real].transpose(0, 1)[None]


def _spread(tokens: Tensor, real: Tensor) -> Tensor:
    rows = tokens.new_zeros(*real.shape, tokens.shape[1], tokens.shape[3])
    rows[real] = tokens[0].transpose(0, 1)
    return rows.transpose(1, 2)
