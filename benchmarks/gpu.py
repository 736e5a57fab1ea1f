"""Attention and whole encoders on a GPU: `python benchmarks/gpu.py`.

On a GPU plans run as operations of torch. `agreement`: the largest difference from the reference on the processor, in
float64, of outputs and of gradients of the sum of their squares, relative to the largest entry, for 2 heads of 600
tokens. `calls`: one call of attention with 12 heads of 64 dimensions: exact by torch's fused attention, by the plan, or
by the plan that gives way to exact attention where that is faster. `models`: encoders of random weights, without
`fk.apply` or within, entered and left at each call. Runs take turns, and the fastest of each counts. Writes
benchmarks/results/gpu.json after every row.
"""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from shapes import TOKENS, random_model
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import fewkeys as fk
from fewkeys.bench.machine import machine, versions
from fewkeys.core.clock import clock
from fewkeys.core.files import write_whole

RESULTS = Path(__file__).parent / "results" / "gpu.json"
GPU = torch.device("cuda")
HEADS, DIM, SLOTS, TURNS = 12, 64, (64, 192), 5
LENGTHS = (1024, 4096, 16384, 65536)
MODELS = [*(("minilm", length) for length in (1024, 4096, 16384, 32768)), ("base", 16384)]
DTYPES = (torch.float32, torch.bfloat16)
CHECKED = {
    **{f"budget({slots})": fk.budget(slots) for slots in (16, 64)},
    "budget(16, cohorts=1)": fk.budget(16, cohorts=1),
    "budget(64, is_causal=True)": fk.budget(64, is_causal=True),
    'budget(64, is_causal=True, memory="constant")': fk.budget(64, is_causal=True, memory="constant"),
    "leverage, window, first-order means": fk.Plan(fk.select.Leverage(16) | fk.Window(9), fk.ClusterMeans(8, rank=3)),
    "top-k, entmax": fk.Plan(fk.TopK(16), weights=fk.weights.Entmax(1.5)),
}


def draw(heads: int, length: int, dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(1, heads, length, DIM, generator=generator).to(dtype) for _ in range(3)]


def agreement(name: str, dtype: torch.dtype) -> dict[str, Any]:
    plan, rows = CHECKED[name].never_exact(), draw(2, 600, dtype)

    def outcome(rows: list[Tensor], impl: Any) -> list[Tensor]:
        leaves = [part.detach().clone().requires_grad_() for part in rows]
        output = fk.attention(*leaves, plan=plan, is_causal=plan.is_causal, impl=impl)
        output.square().sum().backward()
        return [part.detach().cpu().double() for part in (output, *(leaf.grad for leaf in leaves)) if part is not None]

    here = outcome([part.double() for part in rows], "reference")
    there = outcome([part.to(GPU) for part in rows], "auto")
    parts = ("output", "query", "key", "value")
    off = {p: float((a - b).abs().max() / a.abs().max()) for p, a, b in zip(parts, here, there, strict=True)}
    return {"plan": name, "dtype": str(dtype).removeprefix("torch."), "difference": off}


def fastest(calls: dict[str, Callable[[], object]]) -> dict[str, float]:
    """Milliseconds of each call: the least of `TURNS` turns after one that does not count."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(TURNS + 1):
        for name, call in calls.items():
            milliseconds = clock(call, GPU)
            if turn:
                times[name].append(milliseconds)
    return {name: min(of_turns) for name, of_turns in times.items()}


def one_call(slots: int, length: int, dtype: torch.dtype) -> dict[str, Any]:
    rows, plan = [part.to(GPU) for part in draw(HEADS, length, dtype)], fk.budget(slots)
    attend = partial(fk.attention, *rows)
    calls: dict[str, Callable[[], object]] = {
        "exact": partial(scaled_dot_product_attention, *rows),
        "plan": partial(attend, plan=plan.never_exact()),
        "auto": partial(attend, plan=plan),
    }
    name = str(dtype).removeprefix("torch.")
    return {"plan": f"budget({slots})", "length": length, "dtype": name, "ms": fastest(calls)}


def whole_model(shape: str, length: int, dtype: torch.dtype) -> dict[str, Any]:
    model = random_model(shape, length, dtype).to(GPU)
    ids, plan = torch.randint(TOKENS, (1, length), generator=torch.Generator().manual_seed(0)).to(GPU), fk.budget(192)

    def under(plan: fk.Plan) -> None:
        with fk.apply(model, plan):
            model(input_ids=ids)

    calls: dict[str, Callable[[], object]] = {
        "exact": partial(model, input_ids=ids),
        "plan": partial(under, plan.never_exact()),
        "auto": partial(under, plan),
    }
    name = str(dtype).removeprefix("torch.")
    return {"model": shape, "plan": "budget(192)", "length": length, "dtype": name, "ms": fastest(calls)}


def main() -> None:
    at = machine() | {"gpu": torch.cuda.get_device_name(GPU)}
    result: dict[str, Any] = {"machine": at, "versions": versions()}

    def add(kind: str, row: dict[str, Any]) -> None:
        result.setdefault(kind, []).append(row)
        print(json.dumps(row), flush=True)
        write_whole(RESULTS, json.dumps(result, indent=1) + "\n")

    for name in CHECKED:
        for dtype in (torch.float64, torch.float32):
            add("agreement", agreement(name, dtype))
    with torch.no_grad():
        for dtype in DTYPES:
            for slots in SLOTS:
                for length in LENGTHS:
                    add("calls", one_call(slots, length, dtype))
            for shape, length in MODELS:
                add("models", whole_model(shape, length, dtype))


if __name__ == "__main__":
    main()
