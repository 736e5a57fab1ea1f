"""Train a small encoder for 8,192 tokens from all-MiniLM-L6-v2, on a GPU, in minutes.

    python -m experiments.long_encoder.train short --debs FOLDER --out SHORT
    python -m experiments.long_encoder.train long --debs FOLDER --start SHORT --out MODEL

First, windows of 256 tokens: the student's states shall point where the teacher's do, token by token. This repairs
what the change of positions broke. Then documents: every stretch of 254 tokens shall point where the teacher points
that reads it alone; questions shall find their document among others, by sentences hidden in it or passages cut out of
it (`tasks`), and short spans their stretch.

Documents come in groups that share a text and differ in what is hidden, so that only the hidden sentences tell them
apart. A sentence is a tenth of a document of 256 tokens and a three hundredth of one of 8,192, where it is
hard to find at first: so documents grow. Steps and seed are fixed; bfloat16 by autocast.
"""

from __future__ import annotations

import argparse
import json
import math
import os
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from experiments.long_encoder.model import framed, pooled, rotary, saved_student, states, teacher_and_tokenizer
from experiments.long_encoder.tasks import (
    KINDS,
    PASSAGE,
    Words,
    hidden_in,
    passage_cut,
    sentences,
    tokens_of,
    training_words,
)
from experiments.long_encoder.texts import training_rows
from torch import Tensor
from torch.nn.functional import cosine_similarity, cross_entropy, normalize
from torch.utils.data import DataLoader, Dataset

from fewkeys.bench.machine import machine, versions
from fewkeys.core.files import write_json

CHUNK = 254
"""Tokens that the teacher reads at a time, [CLS] and [SEP] beside them."""

TEMPERATURE = 0.05
HIDDEN, SPANS = 3, 64
"""Sentences hidden in a document, and spans that look for their chunk in a step."""
LENGTHS = {256: (8, 8), 512: (4, 8), 1024: (2, 8), 2048: (2, 8), 4096: (1, 8), 8192: (1, 8)}
"""By tokens of a document: groups of a step, and documents of a group."""
GROWING = 0.4
"""The share of the steps in which documents grow. Each length so far is twice as frequent as the one before."""

STAGES = {"short": (600, 4e-4, 100), "long": (2750, 2e-4, 100)}
"""Steps, the largest learning rate, and the steps in which it rises."""

WEIGHTS = {"teach": 10.0, "chunk": 1.0, "document": 0.5}
"""Of the losses of the long stage. With a weight of 3 for the last, stretches of documents lost their meaning."""

EVERY = 50
"""Steps in one line of the record."""

RECORD = "training.json"
"""The file of the record, beside the model."""

WINDOWS = 64
"""Windows of a step of the short stage."""

REMEMBERED = 512
"""Documents of earlier steps that serve as wrong answers."""


@dataclass
class Batch:
    """Documents of one length and what asks for them: tokens and masks, as `framed` makes them."""

    documents: tuple[Tensor, Tensor]
    chunks: tuple[Tensor, Tensor]
    """Of every second document: its neighbour in the group has nearly the same chunks."""
    asking: tuple[Tensor, Tensor]
    """Questions, then spans."""
    answers: Tensor
    """The document of each question."""
    wrong: Tensor
    """(questions, documents): documents that are surely no answer to a question; a group shares its passages."""
    words: list[str | None]
    """By question: its words, or None for a passage."""
    chosen: Tensor
    """The chunk of each span."""

    def asked(self) -> list[set[str]]:
        """By document: the questions, in words, that its hidden sentences answer."""
        pairs = list(zip(self.words, self.answers.tolist(), strict=True))
        return [{word for word, at in pairs if at == document and word} for document in range(self.wrong.shape[1])]


def stretch(rows: dict[str, Tensor], length: int, generator: torch.Generator) -> Tensor:
    """`length` tokens in a row from one of the packages, chosen in proportion to their tokens."""
    sizes = torch.tensor([float(len(row)) for row in rows.values()])
    row = list(rows.values())[int(torch.multinomial(sizes, 1, generator=generator))]
    start = int(torch.randint(len(row) - length, (), generator=generator))
    return row[start : start + length]


def batch_of(rows: dict[str, Tensor], length: int, tokenizer: Any, words: Words, generator: torch.Generator) -> Batch:
    """Documents of `length` tokens with [CLS] and [SEP]."""
    groups, many = LENGTHS[length]
    inside = length - 2
    documents, questions, answers, asking = [], [], [], list[str | None]()
    used: set[str] = set()
    for group in range(groups):
        text, passages = passage_cut(stretch(rows, inside + many * PASSAGE, generator), many, generator)
        for place in range(many):
            made = sentences(HIDDEN, [*KINDS.values()], words, used, generator)
            documents.append(hidden_in(text, [tokens_of(sentence, tokenizer) for sentence, _ in made], generator))
            questions += [*(tokens_of(question, tokenizer) for _, question in made), passages[place]]
            answers += [group * many + place] * (HIDDEN + 1)
            asking += [*(question for _, question in made), None]
    group, answer = torch.arange(len(documents)) // many, torch.tensor(answers)
    is_passage = torch.tensor([word is None for word in asking])[:, None]
    other_document = torch.arange(len(documents)) != answer[:, None]
    wrong = torch.where(is_passage, group != group[answer][:, None], other_document)
    chunks = [chunk for document in documents[::2] for chunk in document[: inside // CHUNK * CHUNK].split(CHUNK)]
    chosen = torch.randperm(len(chunks), generator=generator)[:SPANS]
    starts = torch.randint(CHUNK - PASSAGE, (len(chosen),), generator=generator).tolist()
    spans = [chunks[chunk][start : start + PASSAGE] for chunk, start in zip(chosen.tolist(), starts, strict=True)]
    parts = (framed(rows, tokenizer) for rows in (documents, chunks, [*questions, *spans]))
    return Batch(*parts, answer, wrong, asking, chosen)


@dataclass
class Steps(Dataset[Any]):
    """What each step of a stage reads: windows, or documents that grow with the steps."""

    stage: str
    steps: int
    rows: dict[str, Tensor]
    tokenizer: Any
    words: Words
    seed: int

    def __len__(self) -> int:
        return self.steps

    def __getitem__(self, step: int) -> Any:
        generator = torch.Generator().manual_seed(self.seed * self.steps + step)
        if self.stage == "short":
            return framed([stretch(self.rows, CHUNK, generator) for _ in range(WINDOWS)], self.tokenizer)
        reached = 1 + int(len(LENGTHS) * step / (GROWING * self.steps))
        share = 2.0 ** torch.arange(min(len(LENGTHS), reached))
        length = [*LENGTHS][int(torch.multinomial(share, 1, generator=generator))]
        return batch_of(self.rows, length, self.tokenizer, self.words, generator)


def short_loss(model: Any, teacher: Any, tokens: Tensor, mask: Tensor) -> Tensor:
    """One minus the cosine to the teacher's states, of tokens and of pooled vectors."""
    with torch.no_grad():
        goal = states(teacher, tokens, mask)
    got = states(model, tokens, mask)
    token = 1 - cosine_similarity(got, goal, dim=-1).mean()
    whole = 1 - (pooled(got, mask) * pooled(goal, mask)).sum(-1).mean()
    size = (got.norm(dim=-1) / goal.norm(dim=-1) - 1).square().mean()
    return token + whole + 0.1 * size


Memory = deque[tuple[Tensor, set[str]]]
"""Vectors of earlier documents, each with the questions that it answers."""


def long_loss(model: Any, teacher: Any, batch: Batch, memory: Memory) -> dict[str, Tensor]:
    """The three losses of a step over documents, and the share of hidden sentences that were found."""
    hidden, device = states(model, *batch.documents), model.device
    documents, asking = pooled(hidden, batch.documents[1]), len(batch.words)
    inside = (hidden.shape[1] - 2) // CHUNK * CHUNK
    parts = normalize(hidden[::2, 1 : 1 + inside].unflatten(1, (-1, CHUNK)).mean(2).flatten(0, 1), dim=-1)
    with torch.no_grad():
        goal = pooled(states(teacher, *batch.chunks), batch.chunks[1])
    teach = 1 - (parts * goal).sum(-1).mean()
    queries = pooled(states(model, *batch.asking), batch.asking[1])
    chunk = cross_entropy(queries[asking:] @ parts.T / TEMPERATURE, batch.chosen.to(device))

    old = torch.stack([vector for vector, _ in memory]) if memory else documents[:0].detach()
    holds = {word: place for place, (_, asked) in enumerate(memory) for word in asked}
    wrong_old = torch.ones(asking, len(memory), dtype=torch.bool)
    for question, word in enumerate(batch.words):
        if word in holds:
            wrong_old[question, holds[word]] = False
    right = torch.arange(len(documents)) == batch.answers[:, None]
    allowed, answers = torch.cat([batch.wrong | right, wrong_old], 1).to(device), batch.answers.to(device)
    scores = (queries[:asking] @ torch.cat([documents, old]).T / TEMPERATURE).masked_fill(~allowed, -torch.inf)
    document, found = cross_entropy(scores, answers), (scores.argmax(1) == answers).float()
    memory.extend(zip(documents.detach(), batch.asked(), strict=True))
    is_hidden = torch.tensor([word is not None for word in batch.words], device=device)
    return {"teach": teach, "chunk": chunk, "document": document, "found": found[is_hidden].mean()}


def train(
    model: Any, teacher: Any, tokenizer: Any, rows: dict[str, Tensor], options: argparse.Namespace
) -> list[dict[str, float]]:
    """One stage; the record has the losses, each the mean of `EVERY` steps."""
    data = Steps(options.stage, options.steps, rows, tokenizer, training_words(tokenizer), options.seed)
    model.to(options.device).train()
    teacher.to(options.device)
    model.embeddings.word_embeddings.weight.requires_grad_(False)
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(weights, options.rate, weight_decay=0.01, fused=True)
    memory: Memory = deque(maxlen=REMEMBERED)
    record: list[dict[str, float]] = []
    sums: dict[str, Tensor] = {}
    rise, begin = STAGES[options.stage][2], perf_counter()
    for step, batch in enumerate(DataLoader(data, batch_size=None, num_workers=min(8, (os.cpu_count() or 2) // 2))):
        falling = 0.05 + 0.95 * (1 + math.cos(math.pi * step / options.steps)) / 2
        for group in optimizer.param_groups:
            group["lr"] = options.rate * min(1, (step + 1) / rise) * falling
        with torch.autocast(model.device.type, torch.bfloat16):
            if options.stage == "short":
                losses = {"token": short_loss(model, teacher, *batch)}
                loss = losses["token"]
            else:
                losses = long_loss(model, teacher, batch, memory)
                loss = sum(weight * losses[name] for name, weight in WEIGHTS.items())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        for name, value in losses.items():
            sums[name] = sums.get(name, 0) + value.detach() / EVERY
        if (step + 1) % EVERY == 0:
            record.append({"seconds": round(perf_counter() - begin), "step": step + 1})
            record[-1] |= {name: round(float(value), 4) for name, value in sums.items()}
            print(options.stage, record[-1], f"of {options.steps} steps", flush=True)
            sums = {}
    return record


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("stage", choices=STAGES)
    parser.add_argument("--debs", type=Path, required=True, help="the folder of the packages (texts.py names them)")
    parser.add_argument("--start", type=Path, help="the model of the short stage, for the long one")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--rate", type=float)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()
    if (options.stage == "long") != (options.start is not None):
        parser.error("--start is needed for the long stage, and not known to the short one")
    steps, rate, _ = STAGES[options.stage]
    options.steps, options.rate = options.steps or steps, options.rate or rate
    teacher, tokenizer = teacher_and_tokenizer()
    rows = training_rows(options.debs, tokenizer)
    model = rotary(teacher) if options.start is None else saved_student(options.start)
    earlier = [] if options.start is None else json.loads((options.start / RECORD).read_text())["stages"]
    record = train(model, teacher, tokenizer, rows, options)
    model.save_pretrained(options.out)
    tokenizer.save_pretrained(options.out)
    stage = {
        "stage": options.stage,
        "steps": options.steps,
        "rate": options.rate,
        "seed": options.seed,
        "losses": record,
    }
    result = {"tokens": {name: len(row) for name, row in rows.items()}, "stages": [*earlier, stage]}
    at = machine() | ({"gpu": torch.cuda.get_device_name()} if options.device == "cuda" else {})
    write_json(options.out, RECORD, result | {"machine": at, "versions": versions()})


if __name__ == "__main__":
    main()
