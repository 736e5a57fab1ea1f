"""Does a trained long encoder still find documents when it reads them with few keys?

    python -m experiments.long_encoder.judge --model MODEL --text wikitext.txt.gz

Tasks, at every length (`tasks`): the document that holds a pass key, or a fact; the document that a passage was cut
from; and the stretch of 254 tokens, of all documents, that a span comes from, by late chunks. Documents are ranked by
the cosine of their vector and the question's. Questions are short and always read exactly. For each document all rows
take turns, so their times can be compared. all-MiniLM-L6-v2 reads the documents that it can read, too.

Writes long_encoder.json, with the machine, table.md and long_encoder.png to results/; `--draw` only draws.
"""

from __future__ import annotations

import argparse
import json
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from experiments.decoders.decoder import read_text
from experiments.long_encoder.model import framed, pooled, saved_student, states, teacher_and_tokenizer
from experiments.long_encoder.tasks import JUDGING, KINDS, PASSAGE, hidden_in, passage_cut, sentences, tokens_of
from experiments.long_encoder.texts import token_row
from experiments.long_encoder.train import RECORD
from torch import Tensor
from torch.nn.functional import normalize

import fewkeys as fk
from fewkeys.bench.machine import machine, versions
from fewkeys.core.files import write_json, write_whole
from fewkeys.report.style import Look, draw, logarithmic, name_lines, save, say, sheet

RESULTS = Path(__file__).parent / "results"
DOCUMENTS, ASKED, CHUNK = 20, 5, 254
LENGTHS = (512, 1024, 2048, 4096, 8192)
ORACLE_UP_TO = 1024
"""The oracle sorts all scores: longer documents take hours."""
RESAMPLES = 2000
SHOWN = ("task", "length", "plan", "found", "of_exact", "cosine", "seconds")
"""What is printed of a row."""
TASKS = {"pass key": "the pass key's document", "fact": "the fact's document", "passage": "the passage's document",
         "chunk": "the span's late chunk"}  # fmt: skip

PLANS: dict[str, fk.Plan | None] = {
    "exact": None,
    "budget(64)": fk.budget(64).never_exact(),
    "budget(192)": fk.budget(192).never_exact(),
    "sinks + window 192": fk.Plan(fk.Sinks(4) | fk.Window(187)).never_exact(),
    "key norm 192": fk.Plan(fk.select.KeyNorm(192)).never_exact(),
    "random keys 192": fk.Plan(fk.RandomKeys(192)).never_exact(),
    "oracle 192": fk.Plan(fk.TopK(192)).never_exact(),
}
TEACHER = "all-MiniLM-L6-v2, exact"
"""The row of the teacher, at the lengths that it can read."""
LOOKS = {"exact": Look("#000000", dash="--"), "budget(64)": Look("#56b4e9"), "budget(192)": Look("#009e73", width=3.4),
         "sinks + window 192": Look("#d55e00"), "key norm 192": Look("#a3a3a3", marker="+"),
         "random keys 192": Look("#767676", marker="x"), "oracle 192": Look("#cc79a7", marker="D")}  # fmt: skip


@dataclass
class Row:
    """What one plan made of the documents of one task and length."""

    vectors: list[Tensor] = field(default_factory=list)
    chunks: list[Tensor] = field(default_factory=list)
    seconds: float = 0.0


def documents_of(task: str, row: Tensor, length: int, tokenizer: Any, seed: int) -> tuple[list[Tensor], list[Tensor]]:
    """Documents of `length` tokens with [CLS] and [SEP], and `ASKED` questions for each, in the order of documents."""
    generator = torch.Generator().manual_seed(seed + length)
    inside = length - 2
    if task == "passage":
        whole = inside + ASKED * PASSAGE
        count = min(DOCUMENTS, len(row) // whole)
        starts = torch.linspace(0, len(row) - whole, count).long().tolist()
        cut = [passage_cut(row[start : start + whole], ASKED, generator) for start in starts]
        return [document for document, _ in cut], [passage for _, passages in cut for passage in passages]
    start = int(torch.randint(len(row) - inside, (), generator=generator))
    documents, questions, used = [], [], set[str]()
    for _ in range(DOCUMENTS):
        made = sentences(ASKED, (KINDS[task],), JUDGING, used, generator)
        hidden = [tokens_of(sentence, tokenizer) for sentence, _ in made]
        documents.append(hidden_in(row[start : start + inside], hidden, generator))
        questions += [tokens_of(question, tokenizer) for _, question in made]
    return documents, questions


def spans_of(documents: list[Tensor], seed: int) -> tuple[list[Tensor], Tensor]:
    """`ASKED` spans of every document, each from inside a chunk, and the number of that chunk among all."""
    generator = torch.Generator().manual_seed(seed)
    spans, answers, before = [], [], 0
    for document in documents:
        count = len(document) // CHUNK
        for _ in range(ASKED):
            chunk = int(torch.randint(count, (), generator=generator))
            start = chunk * CHUNK + int(torch.randint(CHUNK - PASSAGE, (), generator=generator))
            spans.append(document[start : start + PASSAGE])
            answers.append(before + chunk)
        before += count
    return spans, torch.tensor(answers)


def read(model: Any, document: Tensor, tokenizer: Any, row: Row) -> None:
    """Add a document's vector and those of its late chunks to a row."""
    tokens, mask = framed([document], tokenizer)
    start = perf_counter()
    hidden = states(model, tokens, mask)
    row.seconds += perf_counter() - start
    row.vectors.append(pooled(hidden, mask)[0])
    count = len(document) // CHUNK
    row.chunks.append(normalize(hidden[0, 1 : 1 + count * CHUNK].unflatten(0, (count, CHUNK)).mean(1), dim=-1))


def asked(model: Any, questions: list[Tensor], tokenizer: Any) -> Tensor:
    tokens, mask = framed(questions, tokenizer)
    return pooled(states(model, tokens, mask), mask)


def ranks(questions: Tensor, vectors: Tensor, answers: Tensor) -> Tensor:
    """The place of each question's answer, from 0."""
    scores = questions @ vectors.T
    return (scores > scores.gather(1, answers[:, None])).sum(1)


def interval(found: Tensor, exact: Tensor) -> list[float]:
    """95 % of found / found exactly: a bootstrap over documents, both (documents, questions)."""
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randint(len(found), (RESAMPLES, len(found)), generator=generator)
    ratio = found.sum(1)[drawn].sum(1) / exact.sum(1)[drawn].sum(1).clamp(min=1)
    return [round(float(value), 4) for value in ratio.quantile(torch.tensor([0.025, 0.975], dtype=ratio.dtype))]


@torch.no_grad()
def judged(
    model: Any, tokenizer: Any, text: Tensor, task: str, length: int, seed: int, plans: dict[str, fk.Plan | None]
) -> list[dict[str, Any]]:
    """One row for each plan, the first of which is exact; passages give the late chunks' rows, too."""
    documents, questions = documents_of(task, text, length, tokenizer, seed)
    plans = {name: plan for name, plan in plans.items() if name != "oracle 192" or length <= ORACLE_UP_TO}
    rows = {name: Row() for name in plans}
    for document in documents:
        for name, plan in plans.items():
            with nullcontext() if plan is None else fk.apply(model, plan):
                read(model, document, tokenizer, rows[name])
    wanted = {task: (asked(model, questions, tokenizer), torch.arange(len(documents)).repeat_interleave(ASKED))}
    if task == "passage":
        spans, chunks = spans_of(documents, seed)
        wanted["chunk"] = (asked(model, spans, tokenizer), chunks)
    result = []
    for kind, (vectors, answers) in wanted.items():
        exact = None
        for name, got in rows.items():
            among = torch.cat(got.chunks) if kind == "chunk" else torch.stack(got.vectors)
            place = ranks(vectors, among, answers)
            found = (place == 0).double().unflatten(0, (-1, ASKED))
            exact = found if exact is None else exact
            gain = torch.where(place < 10, 1 / (place + 2).double().log2(), 0.0)
            cosine = (torch.stack(got.vectors) * torch.stack(next(iter(rows.values())).vectors)).sum(-1)
            share = found.sum() / exact.sum().clamp(min=1)
            figures = {"found": found.mean(), "of_exact": share, "ndcg10": gain.mean(), "cosine": cosine.mean()}
            row = {"task": kind, "length": length, "plan": name, "questions": len(place), "among": len(among)}
            row |= {key: round(float(value), 5) for key, value in figures.items()}
            row |= {"of_exact_95": interval(found, exact), "seconds": round(got.seconds / len(documents), 3)}
            result.append(row)
    return result


def table(rows: list[dict[str, Any]]) -> str:
    """The tasks beside each other, found in %, at every length."""
    lengths = sorted({row["length"] for row in rows})
    text = []
    for task, meaning in TASKS.items():
        text += [f"Found, %: {meaning}", "", "| | " + " | ".join(f"{length:,}" for length in lengths) + " |",
                 "| --- |" + " --- |" * len(lengths)]  # fmt: skip
        for name in (*PLANS, TEACHER):
            cells = {row["length"]: row for row in rows if row["task"] == task and row["plan"] == name}
            shown = [f"{100 * cells[length]['found']:.0f}" if length in cells else "" for length in lengths]
            text.append(f"| {name} | " + " | ".join(shown) + " |")
        text.append("")
    return "\n".join(text)


def figure(rows: list[dict[str, Any]], path: Path) -> None:
    lengths = sorted({row["length"] for row in rows})
    title = "Documents found by a trained encoder that reads them with few keys"
    subtitle = "all-MiniLM-L6-v2, trained further with rotary positions for 8,192 tokens"
    page, panels = sheet(title, subtitle, columns=2, rows=2)
    for axes, (task, meaning) in zip(panels, TASKS.items(), strict=True):
        ends = {}
        for name, look in LOOKS.items():
            of_line = [row for row in rows if row["task"] == task and row["plan"] == name]
            cells = sorted((row["length"], 100 * row["found"]) for row in of_line)
            draw(axes, *zip(*cells, strict=True), look)
            ends[name] = cells[-1]
        logarithmic(axes, "x", lengths, lengths)
        axes.set_ylim(-3, 103)
        say(axes, "tokens of a document", "questions whose answer comes first, %", meaning)
        name_lines(axes, ends, LOOKS)
    save(page, path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, help="what train.py saved")
    parser.add_argument("--text", type=Path)
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--draw", action="store_true", help="only draw what is committed")
    options = parser.parse_args()
    target = options.out / "long_encoder.json"
    if not options.draw:
        if options.model is None or options.text is None:
            parser.error("--model and --text are needed, or --draw")
        from transformers import AutoTokenizer

        model, tokenizer = saved_student(options.model), AutoTokenizer.from_pretrained(options.model)
        text, teacher = token_row(read_text(options.text), tokenizer), teacher_and_tokenizer()[0]
        result: dict[str, Any] = {"text_tokens": len(text), "seed": options.seed, "rows": []}
        result["training"] = json.loads((options.model / RECORD).read_text())
        result |= {"machine": machine(), "versions": versions()}
        for length in options.lengths:
            for task in ("pass key", "fact", "passage"):
                new = judged(model, tokenizer, text, task, length, options.seed, PLANS)
                if length <= teacher.config.max_position_embeddings:
                    new += judged(teacher, tokenizer, text, task, length, options.seed, {TEACHER: None})
                for row in new:
                    print(*(f"{name}={row[name]}" for name in SHOWN), flush=True)
                result["rows"] += new
                write_json(options.out, target.name, result)
    rows = json.loads(target.read_text())["rows"]
    write_whole(options.out / "table.md", table(rows))
    figure(rows, options.out / "long_encoder.png")


if __name__ == "__main__":
    main()
