"""How much of itself a real decoder keeps when every query of every layer pays for few keys, by method.

    python experiments/decoders/evidence.py --model FOLDER [--gguf FILE] --text NAME=FILE [--text ...] --out DIR

Perplexity of stretches of text (`likelihood.py`), retrieval tasks after RULER made from the first text (`tasks.py`),
and what single heads need (`heads.py`), with attention replaced in all layers by every row of `methods.py`. Each figure
is added to DIR/results.json as soon as it is known, so an interrupted run goes on; tables and a picture are drawn at
the end, or by `--only report`. All of it takes a day on two cores: the options choose.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from fractions import Fraction
from functools import cache, partial
from itertools import product
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the folder that holds `experiments`

from experiments.decoders import heads
from experiments.decoders.decoder import load, read_text
from experiments.decoders.decoder import options as decoder_options
from experiments.decoders.likelihood import Stretch
from experiments.decoders.methods import EXACT, METHODS, UNTUNED, replaced
from experiments.decoders.report import save_figure, table
from experiments.decoders.tasks import TASKS, Maker, score

from fewkeys.bench.machine import machine, versions
from fewkeys.core.files import read_json, write_json, write_whole

FILE = "results.json"
KINDS = ("perplexity", "retrieval", "heads", "report")
Cell = tuple[dict[str, Any], Callable[[], dict[str, Any]]]


def main(arguments: list[str] | None = None) -> int:
    """Run the command; the exit code."""
    parser = decoder_options(__doc__)
    parser.add_argument("--text", action="append", required=True, help="NAME=FILE, plain or .gz; repeatable")
    parser.add_argument("--out", type=Path, required=True, help="folder for results.json, table.md and figure.png")
    parser.add_argument("--only", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("--lengths", type=int, nargs="+", default=[2048, 4096, 8192], help="tokens")
    parser.add_argument("--slots", type=int, nargs="+", default=[256, 128])
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=UNTUNED, metavar="METHOD", help="rows")
    parser.add_argument("--places", type=Fraction, nargs="+", default=[Fraction(1, 3)], help="shares of a text")
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=TASKS, metavar="TASK", help="of retrieval")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0], help="of the prompts of retrieval")
    given = parser.parse_args(arguments)
    try:
        _run(given)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def _run(given: argparse.Namespace) -> None:
    stated = {"model": given.gguf or Path(given.model).name}
    results = read_json(given.out, FILE) if (given.out / FILE).is_file() else {**stated, "cells": []}
    if results["model"] != stated["model"]:
        raise ValueError(f"--out: {given.out} holds results of {results['model']}; choose another folder")
    known = [cell["of"] for cell in results["cells"]]
    for of, judge in _cells(given):
        if of in known:
            continue
        began = perf_counter()
        found = judge()
        results["cells"].append({"of": of, **found})
        write_json(given.out, FILE, {**results, "versions": versions(with_transformers=True), "machine": machine()})
        shown = {name: round(value, 4) for name, value in found.items() if isinstance(value, float | int)}
        print(f"{', '.join(map(str, of.values()))}: {shown} ({perf_counter() - began:.0f} s)", flush=True)
    if "report" in given.only:
        write_whole(given.out / "table.md", table(results["cells"]))
        save_figure(results["cells"], given.out / "figure.png")
        print(table(results["cells"]))


def _cells(given: argparse.Namespace) -> Iterator[Cell]:
    """What each figure is of, and how it is had: short lengths first."""
    texts = {}
    for one in given.text:
        name, equals, path = one.partition("=")
        if not equals:
            raise ValueError(f"--text: expected NAME=FILE, got {one}")
        texts[name] = read_text(Path(path))
    loaded = cache(partial(load, given.model, given.gguf))
    maker = cache(lambda: Maker(loaded()[1], next(iter(texts.values()))))
    rows = [(m, s) for s in given.slots for m in given.methods if m != EXACT]
    rows = [(EXACT, 0)] * (EXACT in given.methods) + rows
    for length in given.lengths:
        for (name, text), place in product(texts.items(), given.places):
            stretch = cache(lambda text=text, place=place, length=length: Stretch(*loaded(), text, place, length))
            of = {"text": name, "place": str(place), "length": length}
            for method, slots in rows if "perplexity" in given.only else ():
                judge = lambda stretch=stretch, row=(method, slots): stretch().judge(*row)  # noqa: E731
                yield {"kind": "perplexity", **of, "method": method, "slots": slots}, judge
            if "heads" in given.only:
                yield {"kind": "heads", **of}, lambda stretch=stretch: heads.judge(stretch())
        if "retrieval" in given.only:
            for (method, slots), seed, task in product(rows, given.seeds, given.tasks):
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
