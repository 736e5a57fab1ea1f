"""Train a small encoder for 8,192 tokens from all-MiniLM-L6-v2, on a CPU, in about an hour.

    python -m experiments.long_encoder.train short --debs FOLDER --out SHORT
    python -m experiments.long_encoder.train long --debs FOLDER --start SHORT --out MODEL

First, windows of 256 tokens: the student's states shall point where the teacher's do, token by token. This repairs
what the change of positions broke. Then documents of 2,048 to 8,192 tokens: every stretch of 254 tokens shall point
where the teacher points that reads it alone; questions shall find their document among others, by sentences hidden in
it or passages cut out of it (`tasks`), and short spans their stretch. In half of the documents of 2,048 tokens the
positions jump ahead, to 8,192 at most (PoSE, Zhu et al. 2023), so that all distances are met.

Half of a batch's documents share a text with the other half and differ in what is hidden, so that only the hidden
sentences tell them apart. Steps and seed are fixed; bfloat16 by autocast.
"""

from __future__ import annotations

import argparse
import json
import math
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from experiments.long_encoder.model import TOKENS, framed, pooled, rotary, saved_student, states, teacher_and_tokenizer
from experiments.long_encoder.tasks import KINDS, PASSAGE, TRAINING, hidden_in, passage_cut, sentences, tokens_of
from experiments.long_encoder.texts import training_rows
from torch import Tensor
from torch.nn.functional import cosine_similarity, cross_entropy, normalize

from fewkeys.bench.machine import machine, versions
from fewkeys.core.files import write_json

CHUNK = 254
"""Tokens that the teacher reads at a time, [CLS] and [SEP] beside them."""

TEMPERATURE = 0.05
SENTENCES, PASSAGES = 3, 4
LENGTHS = {2048: (4, 0.70), 4096: (2, 0.22), 8192: (2, 0.08)}
"""By tokens of a document: documents of a step, and the share of the steps."""

STAGES = {"short": (400, 4e-4, 30), "long": (280, 5e-5, 20)}
"""Steps, the largest learning rate, and the steps in which it rises. Four times the rate of the long stage destroys
what the short one has learned."""

WEIGHTS = {"teach": 10.0, "chunk": 1.0, "document": 0.3}
"""Of the losses of the long stage. At this temperature the gradient of the last is the largest by far: with a weight
like the others', documents are told apart and their parts lose their meaning."""

EVERY = 10
"""Steps in one line of the record."""

RECORD = "training.json"
"""The file of the record, beside the model."""

REMEMBERED = 128
"""Documents of earlier steps that serve as wrong answers."""


@dataclass
class Batch:
    """Documents of one length and what asks for them."""

    documents: list[Tensor]
    positions: Tensor | None
    questions: list[Tensor]
    answers: Tensor
    """The document of each question."""
    wrong: Tensor
    """(questions, documents): documents that are surely no answer to a question."""
    asked: list[set[str]]
    """By document: the sentences' questions, in words."""
    words: list[str | None]
    """By question: its words, or None for a passage."""


def stretch(rows: dict[str, Tensor], length: int, generator: torch.Generator) -> Tensor:
    """`length` tokens in a row from one of the packages, chosen in proportion to their tokens."""
    sizes = torch.tensor([float(len(row)) for row in rows.values()])
    row = list(rows.values())[int(torch.multinomial(sizes, 1, generator=generator))]
    start = int(torch.randint(len(row) - length, (), generator=generator))
    return row[start : start + length]


def batch_of(rows: dict[str, Tensor], length: int, tokenizer: Any, generator: torch.Generator) -> Batch:
    """Pairs of documents of `length` tokens with [CLS] and [SEP]; a pair shares its text."""
    count, inside = LENGTHS[length][0], length - 2
    documents, questions, answers, words, asked = [], [], [], [], []
    used: set[str] = set()
    for pair in range(count // 2):
        text, passages = passage_cut(stretch(rows, inside + PASSAGES * PASSAGE, generator), PASSAGES, generator)
        for twin in range(2):
            made = sentences(SENTENCES, [*KINDS.values()], TRAINING, used, generator)
            documents.append(hidden_in(text, [tokens_of(sentence, tokenizer) for sentence, _ in made], generator))
            asked.append({question for _, question in made})
            questions += [*(tokens_of(question, tokenizer) for _, question in made), passages[twin]]
            answers += [2 * pair + twin] * (SENTENCES + 1)
            words += [*(question for _, question in made), None]
    answer = torch.tensor(answers)
    ids = torch.arange(count)
    passage = torch.tensor([word is None for word in words])
    wrong = torch.where(passage[:, None], ids // 2 != answer[:, None] // 2, ids != answer[:, None])
    positions = None
    if length < TOKENS and float(torch.rand((), generator=generator)) < 0.5:
        jumps = torch.zeros(length, dtype=torch.long)
        jumps[torch.randint(1, length, (4,), generator=generator)] = 1
        gaps = (jumps * torch.rand(length, generator=generator) * (TOKENS - length) / 4).long()
        positions = (torch.arange(length) + gaps.cumsum(0))[None]
    return Batch(documents, positions, questions, answer, wrong, asked, words)


def short_loss(model: Any, teacher: Any, rows: dict[str, Tensor], tokenizer: Any, generator: torch.Generator) -> Tensor:
    """One minus the cosine to the teacher's states, of tokens and of pooled vectors: 32 windows."""
    tokens, mask = framed([stretch(rows, CHUNK, generator) for _ in range(32)], tokenizer)
    with torch.no_grad():
        goal = states(teacher, tokens, mask)
    got = states(model, tokens, mask)
    token = 1 - cosine_similarity(got, goal, dim=-1).mean()
    whole = 1 - (pooled(got, mask) * pooled(goal, mask)).sum(-1).mean()
    size = (got.norm(dim=-1) / goal.norm(dim=-1) - 1).square().mean()
    return token + whole + 0.1 * size


Memory = deque[tuple[Tensor, set[str]]]
"""Vectors of earlier documents, each with the questions that it answers."""


def long_loss(
    model: Any, teacher: Any, batch: Batch, tokenizer: Any, memory: Memory, generator: torch.Generator
) -> dict[str, Tensor]:
    """The three losses of a step over documents."""
    tokens, mask = framed(batch.documents, tokenizer)
    hidden = model(input_ids=tokens, position_ids=batch.positions).last_hidden_state.float()
    documents = pooled(hidden, mask)
    # Every second document, since its twin has nearly the same chunks.
    chunks = [document[: len(document) // CHUNK * CHUNK].split(CHUNK) for document in batch.documents[::2]]
    parts = hidden[::2, 1:-1][:, : len(chunks[0]) * CHUNK].unflatten(1, (-1, CHUNK)).mean(2).flatten(0, 1)
    parts = normalize(parts, dim=-1)
    flat = [chunk for document in chunks for chunk in document]
    with torch.no_grad():
        goal = torch.cat([pooled(states(teacher, *framed(list(some), tokenizer)), torch.ones(len(some), CHUNK + 2))
                          for some in (flat[i : i + 16] for i in range(0, len(flat), 16))])  # fmt: skip
    teach = 1 - (parts * goal).sum(-1).mean()

    chosen = torch.randperm(len(flat), generator=generator)[:24].tolist()
    spans = []
    for chunk in chosen:
        start = int(torch.randint(CHUNK - PASSAGE, (), generator=generator))
        spans.append(flat[chunk][start : start + PASSAGE])
    asking = [*batch.questions, *spans]
    asking_tokens, asking_mask = framed(asking, tokenizer)
    queries = pooled(states(model, asking_tokens, asking_mask), asking_mask)
    of_documents, of_chunks = queries[: len(batch.questions)], queries[len(batch.questions) :]

    chunk = cross_entropy(of_chunks @ parts.T / TEMPERATURE, torch.tensor(chosen))
    old = torch.stack([vector for vector, _ in memory]) if memory else documents[:0].detach()
    wrong_old = torch.tensor([[word is None or word not in asked for _, asked in memory] for word in batch.words],
                             dtype=torch.bool).reshape(len(batch.words), len(memory))  # fmt: skip
    right = torch.arange(len(documents)) == batch.answers[:, None]
    allowed = torch.cat([batch.wrong | right, wrong_old], 1)
    scores = (of_documents @ torch.cat([documents, old]).T / TEMPERATURE).masked_fill(~allowed, -torch.inf)
    document = cross_entropy(scores, batch.answers)
    memory.extend(zip(documents.detach(), batch.asked, strict=True))
    found = (scores.argmax(1) == batch.answers).float().mean()
    return {"teach": teach, "chunk": chunk, "document": document, "found": found}


def train(
    model: Any, teacher: Any, tokenizer: Any, rows: dict[str, Tensor], options: argparse.Namespace
) -> list[dict[str, float]]:
    """One stage; the record has the losses, each the mean of `EVERY` steps."""
    generator = torch.Generator().manual_seed(options.seed)
    model.train()
    model.embeddings.word_embeddings.weight.requires_grad_(False)
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(weights, options.rate, weight_decay=0.01, fused=True)
    memory: Memory = deque(maxlen=REMEMBERED)
    shares = torch.tensor([share for _, share in LENGTHS.values()])
    record: list[dict[str, float]] = []
    sums: dict[str, float] = {}
    rise, begin = STAGES[options.stage][2], perf_counter()
    for step in range(options.steps):
        falling = 0.05 + 0.95 * (1 + math.cos(math.pi * step / options.steps)) / 2
        for group in optimizer.param_groups:
            group["lr"] = options.rate * min(1, (step + 1) / rise) * falling
        with torch.autocast("cpu", torch.bfloat16):
            if options.stage == "short":
                losses = {"token": short_loss(model, teacher, rows, tokenizer, generator)}
                loss = losses["token"]
            else:
                length = list(LENGTHS)[int(torch.multinomial(shares, 1, generator=generator))]
                batch = batch_of(rows, length, tokenizer, generator)
                losses = long_loss(model, teacher, batch, tokenizer, memory, generator)
                loss = sum(weight * losses[name] for name, weight in WEIGHTS.items())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        for name, value in losses.items():
            sums[name] = sums.get(name, 0.0) + float(value.detach()) / EVERY
        if (step + 1) % EVERY == 0:
            record.append({"seconds": round(perf_counter() - begin), "step": step + 1})
            record[-1] |= {name: round(value, 4) for name, value in sums.items()}
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
    write_json(options.out, RECORD, result | {"machine": machine(), "versions": versions(with_transformers=True)})


if __name__ == "__main__":
    main()
