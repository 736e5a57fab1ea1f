"""What the compiled kernels gain over torch's operations: `python benchmarks/kernels.py`.

One call of `fk.budget(slots).never_exact()` on normal random numbers in float32, by `impl="native"` and by
`impl="torch"`, in turns; the fastest of each counts. Writes benchmarks/results/kernels.json.
"""

import json
from itertools import product
from pathlib import Path
from typing import Any

import torch

import fewkeys as fk
from fewkeys.bench.machine import machine, versions
from fewkeys.core.clock import clock
from fewkeys.core.files import write_whole

RESULTS = Path(__file__).parent / "results" / "kernels.json"
HEADS, LENGTHS, SLOTS, DIM, TURNS = (1, 12), (1024, 4096), (64, 192), 64, 7
WAYS = ("native", "torch")


@torch.no_grad()
def measure(heads: int, length: int, slots: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randn(1, heads, length, DIM, generator=generator) for _ in range(3)]
    plan, times = fk.budget(slots).never_exact(), {way: float("inf") for way in WAYS}
    for turn in range(TURNS + 1):
        for way in WAYS:
            ms = clock(lambda way=way: fk.attention(*rows, plan=plan, impl=way), rows[0].device)  # type: ignore[misc]
            times[way] = min(times[way], ms) if turn else times[way]
    return {"heads": heads, "length": length, "slots": slots, "ms": times, "ratio": times["torch"] / times["native"]}


def main() -> None:
    rows = []
    for setting in product(HEADS, LENGTHS, SLOTS):
        rows.append(measure(*setting))
        print(json.dumps(rows[-1]), flush=True)
    result = {"machine": machine(), "versions": versions(), "rows": rows}
    write_whole(RESULTS, json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
