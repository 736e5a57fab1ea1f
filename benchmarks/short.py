"""Batches of many short sequences, exactly and by `impl="auto"` and the plan's kernels: `python benchmarks/short.py`.

`budget(64)`, 12 heads of 32 in float32 as MiniLM has them, sequences all of one length or of random ones from a quarter
of it on (`lengths`; exact attention gets the mask). The three take turns; figures are medians of the turns, ratios
medians of the ratios turn by turn. Writes benchmarks/results/short.json.
"""

import json
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

import fewkeys as fk
from fewkeys.bench.machine import machine, versions
from fewkeys.core.clock import clock
from fewkeys.core.files import write_whole

RESULTS = Path(__file__).parent / "results" / "short.json"
SHAPES = [(sequences, length) for length in (64, 128, 256) for sequences in (32, 128)]
HEADS, DIM, SLOTS, TURNS = 12, 32, 64, 9


@torch.no_grad()
def measure(sequences: int, length: int, padded: bool) -> dict[str, Any]:
    g = torch.Generator().manual_seed(0)
    tensors = [torch.randn(sequences, HEADS, length, DIM, generator=g) for _ in range(3)]
    lengths = torch.randint(length // 4, length + 1, (sequences,), generator=g) if padded else None
    mask = (torch.arange(length) < lengths[:, None])[:, None, None] if lengths is not None else None
    plan = fk.budget(SLOTS)
    calls = {
        "exact": lambda: scaled_dot_product_attention(*tensors, attn_mask=mask),
        "auto": lambda: fk.attention(*tensors, plan=plan, lengths=lengths),
        "kernels": lambda: fk.attention(*tensors, plan=plan.never_exact(), lengths=lengths, impl="native"),
    }
    times: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(TURNS + 1):
        for name, call in calls.items():
            took = clock(call, tensors[0].device)
            if turn:
                times[name].append(took)
    over = {name: median(b / a for a, b in zip(times["exact"], own, strict=True)) for name, own in times.items()}
    ms = {name: median(own) for name, own in times.items()}
    return {"sequences": sequences, "length": length, "padded": padded, "ms": ms, "over_exact": over}


def main() -> None:
    rows = [measure(*shape, padded) for shape in SHAPES for padded in (False, True)]
    for row in rows:
        print(json.dumps(row))
    result = {"machine": machine(), "versions": versions(), "rows": rows}
    write_whole(RESULTS, json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
