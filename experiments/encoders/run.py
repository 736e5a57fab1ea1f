"""One rule for the shares of a plan, chosen on some encoders and judged on others.

    python -m experiments.encoders.run --files text=wikitext.txt.gz whisper=DIR speech=FILE.wav mpnet=DIR vit=DIR \
        mnist=DIR rxnmapper=DIR

Every model reads inputs of several lengths. Every plan of `shares.py`, and the rows beside them, are judged on its
queries, keys and values. The figures are written to results/encoders.json as they are measured, so that a stopped run
goes on. For each model, `choose.py` then chooses a rule on all others; results/table.md and results/encoders.png show
the outcome. `--draw` only chooses and draws again.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from experiments.encoders.choose import conclusions
from experiments.encoders.judge import Problem, best_keys, error, problem
from experiments.encoders.models import ENCODERS, captured
from experiments.encoders.report import BUDGET, ORACLE, SHARED, WITHOUT, save_picture, table
from experiments.encoders.shares import WITHOUT_WINDOW, cells, cohorts_of

import fewkeys as fk
from fewkeys.bench.machine import machine, versions
from fewkeys.core.files import read_json, write_json

RESULTS = Path(__file__).parent / "results"
FILE = "encoders.json"
SLOTS = (8, 16, 32, 64, 128, 192, 512)


def main(arguments: list[str] | None = None) -> int:
    """Run the command; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--files", nargs="+", default=[], metavar="NAME=PATH", help="where models and inputs are")
    parser.add_argument("--models", nargs="+", choices=ENCODERS, default=list(ENCODERS), metavar="NAME")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--work", type=Path, default=Path("out/encoders"), help="where captures are kept")
    parser.add_argument("--draw", action="store_true", help="only choose and draw from the figures that are there")
    options = parser.parse_args(arguments)
    data: dict[str, Any] = {"errors": {}}
    if (options.out / FILE).is_file():
        data = read_json(options.out, FILE)
    try:
        if not options.draw:
            torch.set_num_threads(1)
            paths = {name: Path(path) for name, _, path in (pair.partition("=") for pair in options.files)}
            for name in options.models:
                for length in ENCODERS[name].lengths[::-1]:
                    data |= {"machine": machine(), "versions": versions()}
                    x = problem(captured(name, length, paths, options.work), ENCODERS[name].layers)
                    for _ in _judged(data["errors"], name, length, x):
                        write_json(options.out, FILE, data)
    except ValueError as missing:
        print(f"error: {missing}", file=sys.stderr)
        return 2
    data["chosen"] = conclusions(data["errors"])
    write_json(options.out, FILE, data)
    (options.out / "table.md").write_text(table(data))
    save_picture(data, options.out / "encoders.png")
    print(table(data))
    return 0


@torch.no_grad()
def _judged(errors: dict[str, Any], name: str, length: int, x: Problem) -> Iterator[None]:
    """Add the missing figures of one model and length; yields after each number of slots."""
    begun = perf_counter()
    for slots in (slots for slots in SLOTS if 2 * slots <= length):
        plans = errors.setdefault(f"{name} {length} {slots}", {})
        if ORACLE not in plans:
            plans[ORACLE] = _short(best_keys(x, slots))
        for plan, made in (compared(slots) | {str(cell): cell.plan() for cell in cells(slots)}).items():
            if plan not in plans:
                plans[plan] = _short(error(x, made))
        yield
    spent = perf_counter() - begun
    print(f"{name}, {length} tokens: {x.scores.shape[0] * x.scores.shape[1]} heads, {spent:.0f} s", file=sys.stderr)


def compared(slots: int) -> dict[str, fk.Plan]:
    """The plans that the rules are compared with, by name."""
    window = slots // 4 | 1
    return {
        BUDGET: fk.budget(slots).never_exact(),
        WITHOUT: WITHOUT_WINDOW.cell(slots, cohorts_of(slots)).plan(),
        SHARED: fk.budget(slots, cohorts=1).never_exact(),
        "random keys + window": fk.Plan(fk.RandomKeys(slots - window) | fk.Window(window)),
        "key norm + window": fk.Plan(fk.select.KeyNorm(slots - window) | fk.Window(window)),
    }


def _short(errors: tuple[float, float]) -> list[float]:
    """The mean error and that of the worst head, with four digits."""
    return [float(f"{value:.4g}") for value in errors]


if __name__ == "__main__":
    sys.exit(main())
