"""Sentence pairs: read from a folder or through `datasets`, split into byte pairs, cut into batches of like lengths."""

from __future__ import annotations

import gzip
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fewkeys.integrations.loading import quiet

PAD, UNKNOWN, END = 0, 1, 2
LONGEST = 64
"""Byte pairs of a sentence; longer ones are not trained on and cut when they are judged."""


@dataclass(frozen=True)
class Pairs:
    """Sentences of two languages, line by line."""

    source: tuple[str, ...]
    target: tuple[str, ...]

    def first(self, count: int) -> Pairs:
        """The first pairs."""
        return Pairs(self.source[:count], self.target[:count])


@dataclass(frozen=True)
class Batch:
    """Token ids (B, N), padded on the right, of both sides; every sentence ends with `END`."""

    source: Tensor
    target: Tensor

    @property
    def inputs(self) -> dict[str, Tensor]:
        """What the model is called with: the decoder sees the target one step late, its first token is `PAD`."""
        late = self.target.roll(1, 1)
        late[:, 0] = PAD
        real = late.ne(PAD)
        real[:, 0] = True
        return {
            "input_ids": self.source,
            "attention_mask": self.source.ne(PAD).long(),
            "decoder_input_ids": late,
            "decoder_attention_mask": real.long(),
        }


def read_folder(folder: Path, source: str, target: str) -> dict[str, Pairs]:
    """The splits train, val and test of a folder of line-aligned files `SPLIT*.LANGUAGE`, plain or .gz.

    Raises ValueError, one line, for files that are missing or not aligned.
    """
    found = {}
    for split in ("train", "val", "test"):
        sides = []
        for language in (source, target):
            files = sorted(path for end in ("", ".gz") for path in folder.glob(f"{split}*.{language}{end}"))
            if len(files) != 1:
                raise ValueError(f"--data: expected one file {split}*.{language}[.gz] in {folder}, got {len(files)}")
            sides.append(_lines(files[0]))
        if len(sides[0]) != len(sides[1]):
            raise ValueError(f"--data: {split} has {len(sides[0])} lines of {source} and {len(sides[1])} of {target}")
        found[split] = Pairs(*sides)
    return found


def read_dataset(name: str, source: str, target: str) -> dict[str, Pairs]:
    """The same from a data set of `datasets` with a `translation` column: "NAME" or "NAME:CONFIGURATION"."""
    try:
        from datasets import load_dataset
    except ImportError:
        raise ValueError(
            "--dataset: needs the package datasets, which is not installed; pip install datasets"
        ) from None
    place, _, configuration = name.partition(":")
    loaded = load_dataset(place, configuration or None)
    found = {}
    for split, own in (("train", "train"), ("val", "validation"), ("test", "test")):
        rows = loaded[own]["translation"]
        found[split] = Pairs(tuple(row[source] for row in rows), tuple(row[target] for row in rows))
    return found


def _lines(path: Path) -> tuple[str, ...]:
    try:
        raw = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        return tuple(raw.decode("utf-8").splitlines())
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise ValueError(f"--data: cannot read {path}: {error}") from None


def train_tokenizer(pairs: Pairs, size: int) -> Any:
    """A byte-pair tokenizer of both languages together, `size` tokens."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    with quiet():
        tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
        tokenizer.normalizer = normalizers.NFC()
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
        tokenizer.decoder = decoders.Metaspace()
        trainer = trainers.BpeTrainer(
            vocab_size=size, special_tokens=["<pad>", "<unk>", "</s>"], show_progress=False, min_frequency=2
        )
        tokenizer.train_from_iterator([*pairs.source, *pairs.target], trainer)
        return PreTrainedTokenizerFast(
            tokenizer_object=tokenizer, pad_token="<pad>", unk_token="<unk>", eos_token="</s>"
        )


def encode(tokenizer: Any, sentences: Sequence[str]) -> list[list[int]]:
    """Token ids of every sentence, `END` last, at most `LONGEST`."""
    rows = tokenizer(list(sentences), add_special_tokens=False)["input_ids"]
    return [[*row[: LONGEST - 1], END] for row in rows]


def padded(rows: Sequence[Sequence[int]]) -> Tensor:
    """Rows of token ids as one tensor (B, N), padded on the right."""
    return torch.nn.utils.rnn.pad_sequence([torch.tensor(row) for row in rows], batch_first=True, padding_value=PAD)


def even_batches(tokenizer: Any, pairs: Pairs, part: str, size: int = 128) -> list[Batch]:
    """All pairs, batched so that the attention of a `part` of the model sees no padding.

    part: "encoder", sources of one length; "decoder", targets of one length; "cross": both.
    """
    source, target = encode(tokenizer, pairs.source), encode(tokenizer, pairs.target)
    alike: dict[tuple[int, int], list[int]] = {}
    for i, (own, other) in enumerate(zip(source, target, strict=True)):
        alike.setdefault((len(own) * (part != "decoder"), len(other) * (part != "encoder")), []).append(i)
    cut = [rows[start : start + size] for _, rows in sorted(alike.items()) for start in range(0, len(rows), size)]
    return [Batch(padded([source[i] for i in own]), padded([target[i] for i in own])) for own in cut]


def stream(tokenizer: Any, pairs: Pairs, size: int, generator: torch.Generator) -> Iterator[Batch]:
    """Batches of pairs of like length for ever: every epoch shuffles pairs, then batches."""
    source, target = encode(tokenizer, pairs.source), encode(tokenizer, pairs.target)
    short = [i for i in range(len(source)) if max(len(source[i]), len(target[i])) < LONGEST]
    while True:
        noise = torch.rand(len(source), generator=generator).tolist()
        short.sort(key=lambda i: (len(source[i]) + len(target[i]) + 4 * noise[i], i))
        cut = [short[start : start + size] for start in range(0, len(short) - size + 1, size)]
        for index in torch.randperm(len(cut), generator=generator).tolist():
            own = cut[index]
            yield Batch(padded([source[i] for i in own]), padded([target[i] for i in own]))
