"""Value-aware against value-oblivious attention: how much of a model is lost when every query keeps r keys.

    python experiments/value_aware/run.py --text wikitext.txt.gz --out experiments/value_aware/results

Trains an encoder (MiniLM with a new masked-language-model head, or the masked language model in --model) and a small
causal language model with three kernels, then replaces attention in every layer by each method at each r. Stopped and
started again, it goes on where it was: finished stages and cells are in --work.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from dataclasses import asdict
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the folder that holds `experiments`

from experiments.value_aware import cells, stages
from experiments.value_aware.data import read
from experiments.value_aware.figure import save_figure
from experiments.value_aware.stages import MODELS, Keeper, Settings
from experiments.value_aware.summary import summarise
from experiments.value_aware.table import table

from fewkeys.bench.machine import machine, versions
from fewkeys.core.files import read_json, write_json, write_whole

QUICK = Settings(
    length=24,
    batch=2,
    head_steps=2,
    kernel_steps=2,
    lm_steps=2,
    sequences=2,
    error_sequences=1,
    sizes=(1, 4),
    gap_sizes=(4,),
)
"""For a look at whether everything runs; the figures mean nothing."""


def main(arguments: list[str] | None = None) -> int:
    """Run the command; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, action="append", required=True, help="text file, plain or .gz; repeatable")
    parser.add_argument("--out", type=Path, required=True, help="folder for results.json, table.md and figure.png")
    parser.add_argument("--work", type=Path, default=Path("out/value_aware"), help="folder for models and cells")
    parser.add_argument("--model", type=Path, help="folder of a masked language model (default: MiniLM, new head)")
    parser.add_argument("--quick", action="store_true", help="seconds instead of an hour; the figures mean nothing")
    given = parser.parse_args(arguments)
    try:
        _run(given, QUICK if given.quick else Settings())
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def _run(given: argparse.Namespace, settings: Settings) -> None:
    train, held = read(given.text)
    identity = {
        "settings": json.loads(json.dumps(asdict(settings))),
        "text": hashlib.sha256((train + held).encode()).hexdigest(),
        "model": None if given.model is None else str(given.model),
    }
    _claim(given.work, identity)
    torch.set_num_threads(1)  # the oracles are many small operations, for which threads would only wait
    stages.prepare(settings, given.model, train, given.work, _say)
    cells.compute(settings, held, given.work, _say)
    keeper = Keeper(given.work)
    sizes = {name: cells.sizes(settings, keeper.model(f"{name}-softmax")) for name in MODELS}
    results = {
        "settings": asdict(settings),
        "text_sha256": identity["text"],
        "encoder": "all-MiniLM-L6-v2" if given.model is None else given.model.name,
        "versions": versions(),
        "machine": machine(),
        **summarise(given.work, sizes),
    }
    write_json(given.out, "results.json", results)
    write_whole(given.out / "table.md", table(results))
    save_figure(results, given.out / "figure.png")
    _say(f"written: {given.out}/results.json, table.md, figure.png")


def _claim(work: Path, identity: dict[str, object]) -> None:
    """Make the work folder ours, or refuse one that holds another run."""
    if (work / "run.json").is_file():
        if read_json(work, "run.json") != identity:
            raise ValueError(f"--work: {work} holds a run with other text, model or settings; choose another folder")
    elif work.exists() and any(work.iterdir()):
        raise ValueError(f"--work: {work} holds something else; choose an empty or new folder")
    write_json(work, "run.json", identity)


def _say(text: str) -> None:
    print(text, flush=True)


if __name__ == "__main__":
    sys.exit(main())
