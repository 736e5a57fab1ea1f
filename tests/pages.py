"""A report and its sample, for pages: every kind of row, and names that would break out of a careless page."""

from dataclasses import replace

import torch

import fewkeys as fk
from captures import captured
from fewkeys.integrations.compare import compare
from fewkeys.judge.result import Sample, WholeTime

TOP, WINDOW, BUDGET = "top-k per query (oracle)", "window", "fewkeys budget"
PLANS = {
    8: {TOP: fk.Plan(fk.TopK(8)), WINDOW: fk.Plan(fk.Window(8)), BUDGET: fk.budget(8)},
    16: {
        WINDOW: fk.Plan(fk.Window(16)),
        BUDGET: fk.budget(16),
        "first order": fk.Plan(fk.Window(8), fk.ClusterMeans(4, rank=2)),
    },
    None: {"exact": fk.Plan(), "</script><b>mine</b>": fk.Plan(fk.Window(3), fk.rest.UniformSample(4))},
}
TIMES = {(8, 16): 2.0, (8, 64): 4.0, (8, 256): 8.0, (16, 16): 3.0, (16, 64): 6.0, (16, 256): 12.0}
"""Milliseconds of whole models under `BUDGET` by budget and length; exact attention takes 1, 5 and 32."""
EXACT = {16: 1.0, 64: 5.0, 256: 32.0}
TOKENS = ["[CLS]", "</script>", "##ing", *(f"word{i}" for i in range(37))]


def small(timed=False):
    """A report of 2 layers of 4 heads; `timed`: with times of whole models."""
    report = compare(captured(batches=1, size=1), PLANS)
    report = replace(report, sample=replace(report.sample, tokens=TOKENS))
    times = [WholeTime(BUDGET, slots, n, 3, ms, EXACT[n]) for (slots, n), ms in TIMES.items()]
    return replace(report, whole_times=times) if timed else report


def large(report, layers=12, heads=12, length=512, rows=45, queries=4, keys=16):
    """As much as 12 layers of 12 heads may have, of numbers that no packing makes smaller."""
    draw = torch.Generator().manual_seed(0)
    shape = (layers, heads, queries, keys)
    kept = [["01" * (queries * keys // 2)] * heads] * layers
    errors = torch.rand(rows, layers, heads, generator=draw).tolist()
    many = [report.rows[i % len(report.rows)] for i in range(rows)]
    many = [
        replace(row, name=f"{row.name} {i}", per_head={"error": errors[i]}, kept=kept) for i, row in enumerate(many)
    ]
    places = torch.randint(0, length, shape, generator=draw).tolist()
    sample = Sample([9, 99, 199, 399], places, torch.rand(shape, generator=draw).tolist(), ["word"] * length)
    return replace(report, layers=layers, query_heads=heads, rows=many, sample=sample)
