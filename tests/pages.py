"""A report and its sample, for pages: every kind of row, and names that would break out of a careless page."""

from dataclasses import replace

import torch

import fewkeys as fk
from captures import captured
from fewkeys.integrations.compare import compare
from fewkeys.judge.row import WholeTime
from fewkeys.judge.sample import QUERIES, Sample, take

TOP, WINDOW, BUDGET = "top-k per query (oracle)", "window", "fewkeys budget"
PLANS = {
    8: {TOP: fk.Plan(fk.TopK(8)), WINDOW: fk.Plan(fk.Window(8)), BUDGET: fk.budget(8)},
    16: {WINDOW: fk.Plan(fk.Window(16)), BUDGET: fk.budget(16), "moments": fk.Plan(fk.Window(8), fk.rest.Moments())},
    None: {"exact": fk.Plan(), "</script><b>mine</b>": fk.Plan(fk.Window(3), fk.rest.UniformSample(4))},
}
TIMES = {(8, 16): 2.0, (8, 64): 4.0, (8, 256): 8.0, (16, 16): 3.0, (16, 64): 6.0, (16, 256): 12.0}
"""Milliseconds of whole models under `BUDGET` by budget and length; exact attention takes 1, 5 and 32."""
EXACT = {16: 1.0, 64: 5.0, 256: 32.0}
TOKENS = ["[CLS]", "</script>", "##ing", *(f"word{i}" for i in range(37))]


def small(timed=False):
    """A report of 2 layers of 4 heads, and its sample; `timed`: with times of whole models."""
    capture = captured(batches=1, size=1)
    report = compare(capture, PLANS)
    if timed:
        times = [WholeTime(BUDGET, slots, n, 3, ms, EXACT[n]) for (slots, n), ms in TIMES.items()]
        report = replace(report, whole_times=times)
    plans = {name: plan for rows in PLANS.values() for name, plan in rows.items()}
    return report, take(
        capture, [PLANS.get(row.budget, {}).get(row.name, plans[row.name]) for row in report.rows], tokens=TOKENS
    )


def large(report, layers=12, heads=12, length=512, rows=45):
    """As much as 12 layers of 12 heads may have, of numbers that no packing makes smaller."""
    draw = torch.Generator().manual_seed(0)
    many = [replace(row, name=f"{row.name} {i // len(report.rows)}") for i, row in enumerate(report.rows * rows)][:rows]
    many = [replace(row, per_head={"error": torch.rand(layers, heads, generator=draw).tolist()}) for row in many]
    shape = (layers, heads, QUERIES)
    tensors = {"exact": torch.randint(0, 99, (*shape, length), generator=draw, dtype=torch.int16)}
    for i in range(rows):
        bits = torch.randint(0, 255, (*shape, length // 8), generator=draw, dtype=torch.uint8)
        tensors |= {f"{i}.kept": bits, f"{i}.error": torch.rand(shape, generator=draw)}
        if i % 5 == 0:
            tensors[f"{i}.weight"] = torch.randint(0, 999, (*shape, 52), generator=draw, dtype=torch.int16)
            tensors[f"{i}.label"] = torch.randint(-1, 52, (*shape[:2], length), generator=draw, dtype=torch.int16)
    sample = Sample(tuple(f"token{i}" for i in range(length)), tuple(range(0, length, length // QUERIES)), tensors)
    return replace(report, layers=layers, query_heads=heads, rows=many), sample
