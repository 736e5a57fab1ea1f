"""Time plans and exact attention (torch's scaled_dot_product_attention), in turns, at each length. With a model and a
text, the inputs are queries, keys and values of the middle layer, and the output error is measured too; without, they
are random numbers. Writes bench.json, time.png (for two or more lengths) and, with a model, error.png; the pictures
also as PDF.
"""

import argparse
from dataclasses import asdict
from functools import partial

from fewkeys.cli import inputs
from fewkeys.cli.files import deliver
from fewkeys.cli.options import add_common, add_inputs, add_value, budgets, whole
from fewkeys.cli.progress import progress

ROWS = {
    "budget": "fewkeys budget",
    "window": "window",
    "sinks": "sinks + window",
    "leverage": "leverage + window",
    "norm": "key norm",
    "random": "random keys",
    "top-k": "top-k per query (oracle)",
}
"""Rows of `standard_plans` by short names."""


def add_options(parser: argparse.ArgumentParser) -> None:
    add_inputs(parser, sequences=None, required=False)
    add_value(parser, "--lengths", budgets, "1024,2048,4096", "tokens", "N,N,...")
    plans = f"plans to time, from {', '.join(ROWS)}"
    add_value(parser, "--plans", _plans, "budget:192", plans, "NAME:SLOTS,...")
    add_value(parser, "--heads", whole(), 4, "heads")
    add_value(parser, "--dim", whole(), 64, "head size of random inputs")
    dtypes = ("float32", "bfloat16", "float16")
    parser.add_argument("--dtype", choices=dtypes, default="float32", help="default float32")
    parser.add_argument("--causal", action="store_true", help="causal attention")
    parser.add_argument("--backward", action="store_true", help="time forward and backward together")
    add_common(parser, "folder for the results", seed=False)


def run(arguments: argparse.Namespace) -> None:
    real = arguments.demo or arguments.model is not None
    inputs.prepare(arguments, "matplotlib")
    if arguments.text and not real:
        raise ValueError("--text: expected together with --model or --demo, got it alone; random inputs read nothing")
    import torch

    from fewkeys.bench.long_inputs import captured_inputs, random_inputs
    from fewkeys.bench.machine import machine, versions
    from fewkeys.bench.timing import bench
    from fewkeys.judge.standard import standard_plans

    dtype = getattr(torch, arguments.dtype)
    named = inputs.named_as_options(**{"lengths, heads": "--lengths, --heads", "capture": "--model"})
    with progress() as step, named:
        if real:
            draw = captured_inputs(inputs.read(arguments, step, tokens=max(arguments.lengths))[0], dtype=dtype)
        else:
            draw = random_inputs(arguments.dim, dtype=dtype)
        causal = {"is_causal": arguments.causal}
        plans = {name: standard_plans(slots, **causal)[row] for name, (row, slots) in arguments.plans.items()}
        options = {**causal, "heads": arguments.heads, "real": real, "backward": arguments.backward}
        rows = bench(draw, plans, arguments.lengths, **options, progress=step)
    settings = {name: getattr(arguments, name) for name in ("dtype", "causal", "backward")}
    settings["inputs"] = "random" if not real else "all-MiniLM-L6-v2" if arguments.demo else arguments.model
    result = {"machine": machine(), "versions": versions(), "settings": settings, "rows": [*map(asdict, rows)]}

    from fewkeys.report.speed import print_timings, save_pictures

    show, fill = partial(print_timings, rows), partial(save_pictures, rows, settings)
    deliver(arguments, result, show, "bench.json", fill)


def _plans(text: str) -> dict[str, tuple[str, int]]:
    plans = {}
    for name in text.split(","):
        method, _, slots = name.partition(":")
        try:
            plans[name] = ROWS[method], whole()(slots)
        except (KeyError, argparse.ArgumentTypeError):
            wanted = f"names such as budget:192, from {', '.join(ROWS)}"
            raise argparse.ArgumentTypeError(f"expected {wanted}, got {name!r}") from None
    return plans
