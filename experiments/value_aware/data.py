"""Text to training windows and held-out sequences, for the encoder and for the causal language model."""

from __future__ import annotations

import gzip
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

HELD_OUT = 0.1
"""Share of the characters, at the end of each file, that no model is trained on."""


@dataclass(frozen=True)
class Batch:
    """Token ids (B, N) and what is to be predicted at each position, -100 where nothing is."""

    ids: Tensor
    labels: Tensor


def read(paths: Sequence[Path]) -> tuple[str, str]:
    """The text to train on and the held-out text. Raises ValueError, one line, for a file that cannot be read."""
    train, held = [], []
    for path in paths:
        try:
            raw = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
            text = raw.decode("utf-8")
        except (OSError, EOFError, UnicodeDecodeError) as error:
            raise ValueError(f"--text: cannot read {path}: {error}") from None
        cut = text.find("\n", int(len(text) * (1 - HELD_OUT))) + 1
        train.append(text[:cut])
        held.append(text[cut:])
    if not all(train) or not all(held):
        raise ValueError("--text: expected files of at least a few pages, got one too short to split")
    return "".join(train), "".join(held)


def token_ids(text: str, tokenizer: Any) -> Tensor:
    """All tokens of a text without special ones, (T,)."""
    lines = text.splitlines(keepends=True)
    return torch.tensor([token for line in lines for token in tokenizer(line, add_special_tokens=False)["input_ids"]])


def windows(tokens: Tensor, inside: int, batch: int, generator: torch.Generator) -> Iterator[Tensor]:
    """Batches (B, inside) of consecutive tokens for ever: every epoch cuts the text at another offset and shuffles."""
    while True:
        offset = int(torch.randint(min(inside, len(tokens) - inside + 1), (1,), generator=generator))
        count = (len(tokens) - offset) // inside
        rows = tokens[offset : offset + count * inside].view(count, inside)
        rows = rows[torch.randperm(count, generator=generator)]
        yield from (part for part in rows.split(batch) if len(part) == min(batch, count))


def masked(rows: Tensor, tokenizer: Any, share: float, generator: torch.Generator) -> Batch:
    """[CLS] rows [SEP] with a random `share` of the tokens replaced by [MASK]; these are to be predicted."""
    ids = torch.nn.functional.pad(rows, (1, 1))
    ids[:, 0], ids[:, -1] = tokenizer.cls_token_id, tokenizer.sep_token_id
    count = max(1, round(share * rows.shape[1]))
    chosen = torch.rand(rows.shape, generator=generator).topk(count, 1).indices + 1
    hidden = torch.zeros(ids.shape, dtype=torch.bool).scatter(1, chosen, True)
    return Batch(ids.masked_fill(hidden, tokenizer.mask_token_id), ids.masked_fill(~hidden, -100))


def following(rows: Tensor) -> Batch:
    """Every token is to be predicted from those before it."""
    labels = rows.roll(-1, 1)
    labels[:, -1] = -100
    return Batch(rows, labels)
