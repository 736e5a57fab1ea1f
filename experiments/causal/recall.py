"""Associative recall: pairs are shown, then a long stretch of other tokens, then the keys are asked for.

    k1 v1 k2 v2 ...   filler ...   k7 v7 k3 v3 ...

Every key comes once with its value; the answer to a key asked for later is the value that stood behind it, thousands
of tokens ago. Keys, values and filler are tokens of their own kinds; the pairing is drawn anew for every sequence.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from experiments.value_aware.data import Batch
from torch import Tensor

KINDS = 64
VOCABULARY = 3 * KINDS
"""64 keys, 64 values, 64 tokens of filler."""


@dataclass(frozen=True)
class Stage:
    """Sequences of `length` tokens with `pairs` pairs and `questions`, in batches of `batch`.

    With more questions than pairs, keys are asked for several times: many labels, for the beginning of training.
    """

    length: int
    pairs: int
    questions: int
    batch: int
    steps: int


def sequences(stage: Stage, generator: torch.Generator) -> Iterator[Batch]:
    """Batches for ever; labels are the answers, -100 elsewhere."""
    while True:
        yield draw(stage, generator)


def draw(stage: Stage, generator: torch.Generator) -> Batch:
    """One batch."""

    def shuffled(count: int) -> Tensor:
        return torch.rand((stage.batch, count), generator=generator).argsort(-1)

    keys = shuffled(KINDS)[:, : stage.pairs]
    values = KINDS + torch.randint(KINDS, keys.shape, generator=generator)
    asked = shuffled(stage.pairs)
    if stage.questions > stage.pairs:
        asked = torch.randint(stage.pairs, (stage.batch, stage.questions), generator=generator)
    asked = asked[:, : stage.questions]
    between = stage.length - 2 * (stage.pairs + stage.questions)
    filler = 2 * KINDS + torch.randint(KINDS, (stage.batch, between), generator=generator)
    shown = torch.stack([keys, values], -1).flatten(1)
    answers = values.gather(1, asked)
    questions = torch.stack([keys.gather(1, asked), answers], -1).flatten(1)
    ids = torch.cat([shown, filler, questions], 1)
    labels = torch.full_like(ids, -100)
    labels[:, stage.length - 2 * stage.questions :: 2] = answers
    return Batch(ids, labels)
