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

Made by `make families`: every type of model that an auto class of transformers {version} makes, as a tiny random model,
some of them in two ways. Under `fk.apply(model, fk.Plan())` its output must be its own: as it is, shorter and longer
than its windows, padded left and right, without a mask, and with its last token changed, which earlier outputs must not
feel where they do not in the model itself. Under a plan of few slots its output must be finite. The table says what
runs and is right, not how good a plan is for a trained model; `fewkeys compare` says that.

- **apply**: as said above; types that take images or sounds beside text are given text alone where they take that.
  **generate**: greedy, under `apply`, as without. **cache**: greedy, by a `fewkeys.cache` that keeps every key, as
  without a cache. **train**: gradients under a plan of few slots are finite.
- In brackets after a type: where its small model cannot be built or run, it has few layers "of the usual widths"; where
  that does not do either, the row is of the first model inside it that runs by itself, those of text first.
- "windows": all layers have a window of their own, which they keep. Layers beside others keep theirs, too.
- Where scores are capped (Gemma 2), plans need `budget(slots, is_causal=True, memory="constant")`, or `ClusterMeans`
  without a first-order term: the other stand-ins are defined for softmax alone.
- A bias of the distance is part of the score. ALiBi (BLOOM, MPT, Falcon) is one more dimension of queries and keys, so
  that every plan knows it. T5's and MPNet's table is exact on kept keys; a stand-in has the logarithm of the mean of
  exp(bias) over the keys that it speaks for, as the query sees them. Plans need a window and lists, with
  `ClusterMeans` or nothing beside them, as `budget(slots)` has them.
- {flags} rows have attention modules whose flag `is_causal` is not what their mask says; the mask counts.
- A number in brackets points to the reason, below the table: the first part of what the error says. "itself": the
  small model does not do this by itself, either.

| | |
|---|---|
| rows: types of models, some in two ways | {rows} |
| built small, and run by inputs made from the names of their arguments | {tried} |
| of these: the same under an exact plan | {equal} |
| of these: refused, with a reason | {refused} |
| of these: failed | {failed} |
| not tried: too large, another library needed, or inputs of another form | {untried} |
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
    lines += ["\n## Why not\n", *(f"{number}. {reason}" for reason, number in reasons.items())]
    lines += ["\n## Not tried\n", "| type | reason |", "|---|---|"]
    lines += [f"| {name} | {_plain(row[UNTRIED] or '')} |" for name, row in table.items() if UNTRIED in row]
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
