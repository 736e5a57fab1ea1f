"""Questions about a context that exact attention reads once: kvpress by its own code, and the caches of fewkeys.

    python -m experiments.decoders.questions.run --model FOLDER [--gguf FILE] --text FILE

A prompt of `tasks.py` is cut before its first question. The context is read once, and each row keeps its keys of it.
Then questions and answers follow in one forward. An answer is right if each of its judged tokens is the likeliest.
Further figures are the mean log-likelihood of judged tokens, and KL(exact || row), the mean over all tokens from the
first answer on. Each figure is written to results/questions.json at once, so a stopped run goes on. Table and picture
are drawn at the end, or by --report alone.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import cached_property, partial
from importlib.metadata import version
from itertools import product
from pathlib import Path
from typing import Any

import torch
from experiments.cells import Cell, exit_code, measure, opened
from experiments.decoders.decoder import load, options as decoder_options, read_text
from experiments.decoders.methods import EXACT
from experiments.decoders.questions.memories import MEMORIES, Prefill
from experiments.decoders.questions.presses import PRESSES, kvpress, pressed
from experiments.decoders.questions.report import save_picture, table
from experiments.decoders.tasks import TASKS, Maker, Prompt, score
from torch import Tensor

RESULTS = Path(__file__).parents[1] / "results"
FILE = "questions.json"
ROWS = (*MEMORIES, *PRESSES)


def main(arguments: list[str] | None = None) -> int:
    """Run the command; the exit code."""
    parser = decoder_options(__doc__)
    parser.add_argument("--text", type=Path, required=True, help="plain or .gz")
    parser.add_argument("--out", type=Path, default=RESULTS, help=f"folder for {FILE} and the picture")
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=ROWS, metavar="ROW", help=", ".join(ROWS))
    parser.add_argument("--slots", type=int, nargs="+", default=[256, 128])
    parser.add_argument("--length", type=int, default=2048, help="tokens of a prompt, questions included")
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=TASKS, metavar="TASK", help=", ".join(TASKS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="of the prompts, 8 or 12 answers each")
    parser.add_argument("--report", action="store_true", help="measure nothing; draw table and picture")
    options = parser.parse_args(arguments)
    return exit_code(partial(_run, options))


def _run(options: argparse.Namespace) -> None:
    results = opened(options.out, FILE, model=options.gguf or Path(options.model).name)
    if not options.report:
        packages = {}
        if any(row in PRESSES for row in options.rows):
            kvpress()
            packages["kvpress"] = version("kvpress")
        measure(_cells(options), results, options.out, FILE, **packages)
    save_picture(results["cells"], options.slots, options.out / "questions.png")
    for slots in options.slots:
        print(table(results["cells"], slots), end="\n\n")


def _cells(options: argparse.Namespace) -> Iterator[Cell]:
    """The figures, prompt by prompt, since all rows share a prefill."""
    model, tokenizer = load(options.model, options.gguf)
    maker = Maker(tokenizer, read_text(options.text))
    rows = [(EXACT, 0)] * (EXACT in options.rows)
    rows += [(row, slots) for slots in options.slots for row in options.rows if row != EXACT]
    for seed, task in product(options.seeds, options.tasks):
        judge = Judge(model, tokenizer, partial(TASKS[task], maker, options.length, seed))
        for row, slots in rows:
            of = {"task": task, "length": options.length, "seed": seed, "row": row, "slots": slots}
            yield of, partial(judge, row, slots)


class Judge:
    """Judges the answers to the questions of one prompt from what each row keeps of its context."""

    def __init__(self, model: Any, tokenizer: Any, make: Callable[[], Prompt]) -> None:
        self.model, self.tokenizer, self._make = model, tokenizer, make

    @cached_property
    def prompt(self) -> Prompt:
        return self._make()

    @cached_property
    def prefill(self) -> Prefill:
        return Prefill(self.model, self.prompt.tokens[:, : self.prompt.context])

    @cached_property
    def exact(self) -> Tensor:
        """Log-probabilities by exact attention."""
        with MEMORIES[EXACT](self.prefill, 0) as memory:
            return self._answer(memory.cache).log_softmax(-1)

    @torch.no_grad()
    def __call__(self, row: str, slots: int) -> dict[str, float]:
        prompt = self.prompt
        if row in MEMORIES:
            open_memory = MEMORIES[row](self.prefill, slots)
        else:
            open_memory = pressed(row, self.prefill, slots, self.tokenizer)
        exact = self.exact
        with open_memory as memory:
            logits = self._answer(memory.cache)
            price = memory.price(prompt.first, prompt.tokens.shape[1])
        kl = (exact.exp() * (exact - logits.log_softmax(-1))).sum(-1).mean()
        return {**score(logits, prompt), "kl": float(kl), "context": prompt.context, **asdict(price)}

    def _answer(self, cache: Any) -> Tensor:
        """Logits (N - first, V) of the tokens from the first answer on; positions are those of the whole prompt."""
        prompt, tokens = self.prompt, self.prompt.tokens.shape[1]
        logits: Tensor = self.model(
            prompt.tokens[:, prompt.context :],
            past_key_values=cache,
            position_ids=torch.arange(prompt.context, tokens)[None],
            logits_to_keep=tokens - prompt.first,
        ).logits
        return logits[0].float()


if __name__ == "__main__":
    sys.exit(main())
