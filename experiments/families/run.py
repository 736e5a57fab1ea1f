"""Try every type of model that transformers knows, and write docs/families.md and its results.

python -m experiments.families.run              every type: some minutes
python -m experiments.families.run llama bert   these alone, printed
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import re
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

import torch
import transformers
from experiments.families.build import Kind, kinds
from experiments.families.trial import COLUMNS, FAILED, FLAG, FORM, ITSELF, REFUSED, UNTRIED, WINDOWS, YES, Row, trial

RESULTS = Path(__file__).parent / "results" / "families.json"
PAGE = Path(__file__).parents[2] / "docs" / "families.md"
SECONDS, TURNS = 240, 25
"""The longest that a type may take, and after how many types a process is followed by a fresh one."""


def rows(tried: list[Kind]) -> Iterator[tuple[str, Row]]:
    """The row of each type. A type that takes too long, or its process down, fails alone."""
    at = 0
    while at < len(tried):
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(1, context, _quietly) as pool:
            for kind in tried[at : at + TURNS]:
                at += 1
                try:
                    yield str(kind), pool.submit(trial, kind).result(SECONDS)
                except TimeoutError:
                    for process in multiprocessing.active_children():
                        process.kill()
                    yield str(kind), {UNTRIED: f"takes more than {SECONDS} seconds"}
                    break
                except BrokenProcessPool:
                    yield str(kind), {"apply": f"{FAILED}: the process ended"}
                    break


def _quietly() -> None:
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()


HEAD = """# Families of models

`make families` writes this page. It builds a tiny model with random weights for every type of model that an auto
class of transformers {version} makes; some types are built in two ways. The table says which types run and give
correct results. It does not say how good a plan is for a trained model: `fewkeys compare` measures that.

- **apply**: under `fk.apply(model, fk.Plan())`, which keeps every key, the output equals that of the model alone:
  for inputs shorter and longer than its windows, with padding on the left and on the right, and without a mask.
  After a change of the last token, earlier outputs stay the same wherever they do in the model alone. Under a plan
  of few slots the output is finite.
- **generate**: greedy generation under `fk.apply` gives the same tokens.
- **cache**: greedy generation with a `fewkeys.cache` that keeps every key gives the same tokens.
- **train**: gradients under a plan of few slots are finite.

Types that take images or sounds beside text get text alone where they accept that.

Notes:

- Brackets after a type: if a small model of the type cannot be built or run, it is built with few layers "of the
  usual widths". If that fails too, the row is about the named part of the model, the first one that runs alone;
  parts for text are tried first.
- "windows": all layers have windows of their own and keep them. In models with some such layers, these keep their
  windows too.
- Models that cap their scores (Gemma 2) run `budget(slots, is_causal=True)`, but not `fewkeys.cache`. `ClusterMeans`
  with cohorts or a first-order term are defined for softmax only.
- Plans for models with position biases (T5, MPNet) must consist of windows and lists, with `ClusterMeans` or nothing
  for the other keys, as `budget(slots)` does ([details](transformers.md#position-biases)).
- Models with ALiBi (BLOOM, MPT, Falcon) do not use the interface and are refused, as are GPT-J and GPT-Neo.
- In {flags} rows the flag `is_causal` of the attention modules contradicts their mask. fewkeys follows the mask.
- A number in square brackets refers to the list of reasons below the table. A reason is the beginning of the error
  message. "itself": the model cannot do this without fewkeys, either.
- The [results](../experiments/families/results/families.json) also name the types that were not tested, and why.

| | |
|---|---|
| rows: types of models, some in two ways | {rows} |
| built and run; the inputs were made from the names of the arguments | {tried} |
| of these: the same output under an exact plan | {equal} |
| of these: refused, with a reason | {refused} |
| of these: failed | {failed} |
| not tested: too large, needs another library, or unknown inputs | {untried} |
"""


def page(table: dict[str, Row], version: str) -> str:
    """The page, from the results."""
    reasons: dict[str, int] = {}

    def cell(outcome: str | None) -> str:
        if outcome is None or outcome == YES:
            return outcome or ""
        if outcome == WINDOWS:
            return "windows"
        kind, _, reason = outcome.partition(": ")
        if kind == ITSELF:
            return "itself"
        return f"{kind} [{reasons.setdefault(_generic(reason), len(reasons) + 1)}]"

    counts = dict(zip(("equal", "refused", "failed", "untried"), count(table), strict=True))
    numbers = counts | {"rows": len(table), "tried": len(table) - counts["untried"]}
    numbers["flags"] = sum(row.get(FLAG) is not None for row in table.values())
    lines = [HEAD.format(version=version, **numbers)]
    lines += [f"| type | {' | '.join(COLUMNS)} |", "|---" * (len(COLUMNS) + 1) + "|"]
    for name, row in table.items():
        if UNTRIED not in row:
            label = f"{name} ({row[FORM]})" if FORM in row else name
            lines.append(f"| {label} | {' | '.join(cell(row.get(column)) for column in COLUMNS)} |")
    lines += ["\n## Reasons\n", *(f"{number}. {reason}" for reason, number in reasons.items())]
    return "\n".join(lines) + "\n"


def count(table: dict[str, Row]) -> tuple[int, int, int, int]:
    """How many types are equal under an exact plan, refused, failed in any column, and not tried."""
    untried = sum(UNTRIED in row for row in table.values())
    failed = sum(any((outcome or "").startswith(FAILED) for outcome in row.values()) for row in table.values())
    equal = sum(row.get("apply") in (YES, WINDOWS) for row in table.values())
    refused = sum((row.get("apply") or "").startswith(REFUSED + ":") for row in table.values())
    return equal, refused, failed, untried


def _generic(reason: str) -> str:
    """A reason without the name of the class and the shapes of one model."""
    reason = re.sub(
        r"\b[A-Z]\w*(Model|LM|Generation|Attention|Encoder|ForCTC|Head|RNNT|TDT|Backbone)\w*", "this model", reason
    )
    return _plain(re.sub(r"\((\d+, )+\d+\), ", "", reason))


def _plain(reason: str) -> str:
    """A reason that a table can hold."""
    return reason.replace("|", "/").replace("<", "(").replace(">", ")").replace("[", "(").replace("]", ")")[:160]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="types to try and print; none: all, written to the page")
    names = parser.parse_args().names
    table = {}
    for name, row in rows([kind for kind in kinds() if not names or kind.name in names]):
        table[name] = row
        print(name, row, flush=True)
    if not names:
        RESULTS.parent.mkdir(exist_ok=True)
        RESULTS.write_text(json.dumps({"transformers": transformers.__version__, "families": table}, indent=1) + "\n")
        PAGE.write_text(page(table, transformers.__version__))


if __name__ == "__main__":
    main()
