"""The benefit of cohorts of queries: error and milliseconds of `fk.budget` with 1 to 32 cohorts, side by side.

    python -m experiments.peers.cohorts [--text FILE] [--setting NAME ...]

All plans and exact attention take turns in one run, at least three each; a plan's time is its least. Writes
results/cohorts.json beside this file; settings that are not run keep their figures in it.
"""

from __future__ import annotations

import argparse
import sys
from itertools import product
from pathlib import Path

import torch
from experiments.peers.measure import Row, answer, exact, time_all
from experiments.peers.registry import OURS
from experiments.peers.run import RESULTS
from experiments.peers.settings import load

from fewkeys.bench.machine import machine, versions
from fewkeys.core.files import read_json, write_json
from fewkeys.core.metrics import output_error

FILE = "cohorts.json"
SETTINGS = ("minilm", "minilm-4096", "minilm-16384")
SLOTS, COHORTS = (64, 96, 128, 192, 256, 384), (1, 8, 16, 32)


def main(arguments: list[str] | None = None) -> int:
    """Run the command; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--setting", nargs="+", choices=SETTINGS, default=SETTINGS)
    parser.add_argument("--text", type=Path, help="what MiniLM reads, plain or .gz; default: the demo's")
    parser.add_argument("--seconds", type=float, default=10.0, help="of turns at timing, three turns at least")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--work", type=Path, default=Path("out/peers"), help="where captured inputs are kept")
    options = parser.parse_args(arguments)
    data = read_json(options.out, FILE) if (options.out / FILE).is_file() else {"settings": {}}
    for name in options.setting:
        try:
            x = load(name, options.text, options.work)
        except ValueError as error:
            print(f"error: {error}", file=sys.stderr)
            return 2
        rows: list[Row] = [
            {"peer": OURS, "settings": {"slots": slots, "cohorts": cohorts}}
            for slots, cohorts in product(SLOTS, COHORTS)
            if slots <= x.key.shape[2] // 2
        ]
        truth = exact(x)
        with torch.no_grad():
            for row in rows:
                row["error"] = output_error(answer(OURS, row["settings"], x), truth)
            exact_ms, turns = time_all(rows, x, options.seconds, lambda text: None)
        shown = [{**row["settings"], "error": row["error"], "ms": row["ms"]} for row in rows]
        data["settings"][name] = {"exact_ms": exact_ms, "turns": turns, "rows": shown, "machine": machine()}
        write_json(options.out, FILE, {**data, "versions": versions()})
        print(
            name,
            *(f"{row['slots']}/{row['cohorts']}: {row['error']:.3f} in {row['ms']:.1f}" for row in shown),
            sep="\n  ",
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
