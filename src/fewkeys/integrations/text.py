"""Cuts text into equal sequences of token ids."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

BATCH_TOKENS = 4096
"""Tokens of a batch, which bound the memory of a forward pass."""
PIECE = 65_536
"""Characters that are tokenized at once: a long file is read only as far as needed."""


def batches(
    texts: Sequence[str], tokenizer: Any, *, sequences: int, length: int, longest: int | None = None
) -> list[Tensor]:
    """Cut `texts`, joined, into at most `sequences` sequences of exactly `length` tokens: ids (B, length) in batches.

    Each has the tokenizer's special tokens around a text (`[CLS] ... [SEP]`, or a start token). longest: the model's
    positions. `ValueError` if `length` does not fit or the text is too short.
    """
    if longest is not None and length > longest:
        raise ValueError(f"length: expected at most the model's {longest} positions, got {length}; choose fewer")
    before, after = _specials(tokenizer)
    inside = length - len(before) - len(after)
    if inside < 1:
        raise ValueError(f"length: expected more than {len(before) + len(after)} special tokens, got {length}")
    tokens = _tokens(texts, tokenizer, inside * sequences)
    count = len(tokens) // inside
    if count == 0:
        raise ValueError(f"text: expected at least {inside} tokens (one sequence of {length}), got {len(tokens)}")
    rows = [[*before, *tokens[i * inside : (i + 1) * inside], *after] for i in range(min(count, sequences))]
    ids = torch.tensor(rows, dtype=torch.long, device="cpu")
    return list(ids.split(max(1, BATCH_TOKENS // length)))


def positions(model: Any) -> int | None:
    """The longest sequence that `model` takes, if known. Positions for padding (RoBERTa) do not count."""
    longest = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if not isinstance(longest, int) or longest < 1:
        return None
    tables = (module for name, module in model.named_modules() if name.endswith("position_embeddings"))
    padding = next((index for table in tables if (index := getattr(table, "padding_idx", None)) is not None), -1)
    return longest - int(padding) - 1


def _specials(tokenizer: Any) -> tuple[list[int], list[int]]:
    """The special tokens before and after a text."""
    plain = tokenizer("a", add_special_tokens=False)["input_ids"]
    whole = tokenizer("a")["input_ids"]
    for start in range(len(whole) - len(plain) + 1):
        if plain and whole[start : start + len(plain)] == plain:
            return whole[:start], whole[start + len(plain) :]
    raise ValueError("tokenizer: expected one that puts special tokens around a text, got one that changes the text")


def _tokens(texts: Sequence[str], tokenizer: Any, enough: int) -> list[int]:
    """All tokens of the texts, or at least `enough`, without special ones."""
    tokens: list[int] = []
    for text in texts:
        start = 0
        while start < len(text) and len(tokens) < enough:
            end_of_line = text.find("\n", start + PIECE)
            stop = end_of_line + 1 if end_of_line >= 0 else len(text)
            tokens += tokenizer(text[start:stop], add_special_tokens=False, verbose=False)["input_ids"]
            start = stop
    return tokens
