"""Short inputs through a whole model, with and without `fk.apply`: `python benchmarks/short.py`.

A MiniLM-size encoder of random weights under `fk.apply(model, fk.budget(64))`, which gives way to the model's own
attention where that is faster, against the model without it, in turns: medians of the turns, and of the ratios turn by
turn. A turn is as many calls as fill 4,096 tokens, one at least, so that the first call under `fk.apply`, which
chooses, counts as one of many. Entering and leaving `fk.apply` is not timed. Writes benchmarks/results/short.json.
"""

import json
from pathlib import Path
from statistics import median
from typing import Any

import torch
from shapes import random_model

import fewkeys as fk
from fewkeys.bench.machine import machine, versions
from fewkeys.core.clock import clock
from fewkeys.core.files import write_whole

RESULTS = Path(__file__).parent / "results" / "short.json"
SHAPES = [(batch, length) for batch in (1, 32, 128) for length in (64, 256, 512, 1024) if batch * length <= 2**13]
SLOTS, TURNS, KINDS = 64, 9, 1000
TURN_TOKENS = 4096


@torch.no_grad()
def measure(batch: int, length: int) -> dict[str, Any]:
    model = random_model("minilm", length, torch.float32)
    ids = torch.randint(KINDS, (batch, length), generator=torch.Generator().manual_seed(0))

    calls = max(1, TURN_TOKENS // ids.numel())

    def run() -> None:
        for _ in range(calls):
            model(input_ids=ids)

    times: dict[str, list[float]] = {"exact": [], "apply": []}
    for turn in range(TURNS + 1):
        took = {"exact": clock(run, ids.device)}
        with fk.apply(model, fk.budget(SLOTS)):
            took["apply"] = clock(run, ids.device)
        for name, milliseconds in took.items() if turn else ():
            times[name].append(milliseconds)
    over = median(b / a for a, b in zip(times["exact"], times["apply"], strict=True))
    ms = {name: median(turns_ms) / calls for name, turns_ms in times.items()}
    return {"batch": batch, "length": length, "ms": ms, "over_exact": over}


def main() -> None:
    rows = []
    for shape in SHAPES:
        rows.append(measure(*shape))
        print(json.dumps(rows[-1]), flush=True)
    result = {"machine": machine(), "versions": versions(), "rows": rows}
    write_whole(RESULTS, json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
