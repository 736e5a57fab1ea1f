"""How close a decoder stays to exact attention when every query of every layer attends to few keys, by method.

    python experiments/decoders/evidence.py --model FOLDER [--gguf FILE] --text NAME=FILE [--text ...] --out DIR

Attention is replaced in all layers by each method of `methods.py`. Measured are the perplexity of stretches of text
(`likelihood.py`), retrieval tasks after RULER made from the first text (`tasks.py`), and what single heads need
(`heads.py`). Each figure is written to DIR/results.json at once, so an interrupted run goes on. Tables and a picture
are drawn at the end, or by `--only report`. A whole run takes a day on two cores; the options choose parts of it.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from fractions import Fraction
from functools import cache, partial
from itertools import product
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the folder that holds `experiments`

from experiments.cells import Cell, exit_code, measure, opened
from experiments.decoders import heads
from experiments.decoders.decoder import load, options as decoder_options, read_text
from experiments.decoders.likelihood import Stretch
from experiments.decoders.methods import EXACT, METHODS, replaced
from experiments.decoders.report import save_figure, table
from experiments.decoders.tasks import TASKS, Maker, score

from fewkeys.core.files import write_whole

FILE = "results.json"
KINDS = ("perplexity", "retrieval", "heads", "report")


def main(arguments: list[str] | None = None) -> int:
    """Run the command; the exit code."""
    parser = decoder_options(__doc__)
    parser.add_argument("--text", action="append", required=True, help="NAME=FILE, plain or .gz; repeatable")
    parser.add_argument("--out", type=Path, required=True, help="folder for results.json, table.md and figure.png")
    parser.add_argument("--only", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("--lengths", type=int, nargs="+", default=[2048, 4096, 8192], help="tokens")
    parser.add_argument("--slots", type=int, nargs="+", default=[256, 128])
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=METHODS, metavar="METHOD", help="rows")
    parser.add_argument("--places", type=Fraction, nargs="+", default=[Fraction(1, 3)], help="shares of a text")
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=TASKS, metavar="TASK", help="of retrieval")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0], help="of the prompts of retrieval")
    options = parser.parse_args(arguments)
    return exit_code(partial(_run, options))


def _run(options: argparse.Namespace) -> None:
    results = opened(options.out, FILE, model=options.gguf or Path(options.model).name)
    measure(_cells(options), results, options.out, FILE)
    if "report" in options.only:
        write_whole(options.out / "table.md", table(results["cells"]))
        save_figure(results["cells"], options.out / "figure.png")
        print(table(results["cells"]))


def _cells(options: argparse.Namespace) -> Iterator[Cell]:
    """The figures, those of short lengths first."""
    texts = {}
    for pair in options.text:
        name, equals, path = pair.partition("=")
        if not equals:
            raise ValueError(f"--text: expected NAME=FILE, got {pair}")
        texts[name] = read_text(Path(path))
    loaded = cache(partial(load, options.model, options.gguf))
    maker = cache(lambda: Maker(loaded()[1], next(iter(texts.values()))))
    rows = [(m, s) for s in options.slots for m in options.methods if m != EXACT]
    rows = [(EXACT, 0)] * (EXACT in options.methods) + rows
    for length in options.lengths:
        for (name, text), place in product(texts.items(), options.places):
            stretch = cache(lambda text=text, place=place, length=length: Stretch(*loaded(), text, place, length))
            of = {"text": name, "place": str(place), "length": length}
            for method, slots in rows if "perplexity" in options.only else ():
                judge = lambda stretch=stretch, row=(method, slots): stretch().judge(*row)  # noqa: E731
                yield {"kind": "perplexity", **of, "method": method, "slots": slots}, judge
            if "heads" in options.only:
                yield {"kind": "heads", **of}, lambda stretch=stretch: heads.judge(stretch())
        if "retrieval" in options.only:
            for (method, slots), seed, task in product(rows, options.seeds, options.tasks):
                of = {"kind": "retrieval", "task": task, "length": length, "seed": seed}
                judge = lambda *case: _retrieve(loaded()[0], maker(), *case)  # noqa: E731
                yield {**of, "method": method, "slots": slots}, partial(judge, task, length, seed, method, slots)


@torch.no_grad()
def _retrieve(model: Any, maker: Maker, task: str, length: int, seed: int, method: str, slots: int) -> dict[str, float]:
    prompt = TASKS[task](maker, length, seed)
    tokens = prompt.tokens.shape[1]
    with replaced(model, method, slots, tokens, prompt.first) as paid:
        logits = model(prompt.tokens, use_cache=False, logits_to_keep=tokens - prompt.first).logits[0]
        return {**score(logits, prompt), "tokens": tokens, "paid": paid()}


if __name__ == "__main__":
    sys.exit(main())
