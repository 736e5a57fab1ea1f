"""`fewkeys bench`: time plans against exact attention, length by length."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from fewkeys.cli import inputs
from fewkeys.cli.files import deliver, picture
from fewkeys.cli.options import add_common, add_impl, add_model, add_text, budgets, positive
from fewkeys.cli.progress import Step, progress
from fewkeys.core.files import write_whole

if TYPE_CHECKING:
    from fewkeys.bench.timing import Draw
    from fewkeys.plan import Plan

METHODS = ("budget", "constant", "window", "sinks", "leverage", "norm", "random", "top-k")
DTYPES = ("float32", "bfloat16", "float16")


def add_to(commands: Any) -> None:
    """Add the command to the parser's subcommands."""
    parser = commands.add_parser(
        "bench",
        help="time plans against exact attention",
        description="Measure the time of plans and of exact attention (torch's scaled_dot_product_attention), in "
        "turns, at each length: their ratio, growth and memory, and the time that the machine needs at least. With "
        "a model and a text, the inputs are queries, keys and values of the middle layer, and the output error is "
        "measured too. Otherwise the inputs are random numbers. Writes bench.json, time.png (for two or more "
        "lengths) and, with a model, error.png; the pictures also as PDF.",
    )
    add_model(parser, required=False)
    add_text(parser)
    parser.add_argument(
        "--lengths", type=budgets, default=[1024, 2048, 4096, 8192], metavar="N,N,...",
        help="tokens (default 1024,2048,4096,8192)",
    )  # fmt: skip
    parser.add_argument(
        "--plans", type=_plans, default=["budget:192"], metavar="NAME:SLOTS,...",
        help=f"plans to time, from {', '.join(METHODS)} (default budget:192)",
    )  # fmt: skip
    parser.add_argument("--heads", type=positive, default=4, metavar="N", help="heads (default 4)")
    parser.add_argument("--dim", type=positive, default=64, metavar="N", help="head size of random inputs (default 64)")
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help="default float32")
    parser.add_argument("--device", default="cpu", metavar="NAME", help="cpu or cuda (default cpu)")
    parser.add_argument("--causal", action="store_true", help="causal attention")
    parser.add_argument("--backward", action="store_true", help="time forward and backward together")
    add_impl(parser)
    add_common(parser, "folder for the results", seed=False)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    """Time, print, and write the JSON and the pictures."""
    real = arguments.demo or arguments.model is not None
    inputs.prepare(arguments, "matplotlib", real=real)
    if arguments.text and not real:
        raise ValueError("--text: expected together with --model or --demo, got it alone; random inputs read nothing")
    import torch

    from fewkeys.bench.machine import machine, versions
    from fewkeys.bench.timing import as_dict, bench, growth

    if arguments.device.startswith("cuda") and not torch.cuda.is_available():
        raise ValueError("--device: expected a device of this machine, got cuda, which torch does not find; use cpu")
    with progress() as step:
        problem = _problem(arguments, real, step)
        rows, rates = bench(
            problem,
            {name: _plan(name, arguments.causal) for name in arguments.plans},
            arguments.lengths,
            heads=arguments.heads,
            real=real,
            is_causal=arguments.causal,
            backward=arguments.backward,
            impl=arguments.impl,
            progress=step,
        )
    names = dict.fromkeys(row.name for row in rows)
    result: dict[str, Any] = {
        "machine": machine(arguments.device),
        "versions": versions(),
        "settings": {
            "dtype": arguments.dtype,
            "causal": arguments.causal,
            "backward": arguments.backward,
            "impl": arguments.impl,
            "inputs": "random" if not real else "all-MiniLM-L6-v2" if arguments.demo else arguments.model,
            "bytes_per_ms": rates.bytes_per_ms,
            "operations_per_ms": rates.operations_per_ms,
        },
        "growth": {name: growth(rows, name) for name in names},
        "rows": [as_dict(row) for row in rows],
    }

    import json

    from fewkeys.report.speed import headline, print_timings, save_error, save_time

    what = headline(result["settings"], arguments.heads)
    text = json.dumps(result, indent=1, allow_nan=False) + "\n"
    files: dict[str, Any] = {"bench.json": lambda path: write_whole(path, text)}
    if len(set(arguments.lengths)) > 1:
        files |= picture("time", lambda path: save_time(rows, path, title=what))
    if real:
        files |= picture("error", lambda path: save_error(rows, path, title=what))
    deliver(arguments, files, text, lambda: print_timings(rows))


def _problem(arguments: argparse.Namespace, real: bool, step: Step) -> Draw:
    """Where the inputs come from."""
    import torch

    from fewkeys.bench.long_inputs import captured_inputs, random_inputs

    kind = {"dtype": getattr(torch, arguments.dtype), "device": torch.device(arguments.device)}
    if not real:
        return random_inputs(arguments.dim, **kind)
    longest = max(arguments.lengths)
    arguments.length = min(512, longest)
    arguments.sequences = -(-longest // arguments.length)
    opened = inputs.open_model(arguments, step)
    from fewkeys.integrations.transformers import capture

    step(0, 1, "exact attention of every layer")
    return captured_inputs(capture(opened.model, opened.batches), **kind)


def _plans(text: str) -> list[str]:
    names = text.split(",")
    for name in names:
        method, _, slots = name.partition(":")
        if method not in METHODS or not slots.isdigit() or int(slots) < 1:
            raise argparse.ArgumentTypeError(
                f"expected names such as budget:192, from {', '.join(METHODS)}, got {name!r}"
            )
    return names


def _plan(name: str, is_causal: bool) -> Plan:
    """The plan called `name`: the recommended one, or a peer or control with as many slots."""
    import fewkeys as fk

    method, _, count = name.partition(":")
    slots = int(count)
    half = max(1, slots // 2)
    if method == "budget":
        return fk.budget(slots, is_causal=is_causal)
    if method == "constant":
        return fk.budget(slots, is_causal=is_causal, memory="constant")
    keeps = {
        "window": fk.Window(slots),
        "sinks": fk.Sinks(min(4, half)) | fk.Window(slots - min(4, half)) if slots > 1 else fk.Window(1),
        "leverage": fk.select.Leverage(half, centre=True) | fk.Window(half),
        "norm": fk.select.KeyNorm(half) | fk.Window(half),
        "random": fk.RandomKeys(half) | fk.Window(half),
        "top-k": fk.TopK(slots),
    }
    return fk.Plan(keeps[method])
