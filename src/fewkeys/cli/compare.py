"""Measure approximations of attention on a model and a text: the error of the attention output, the effect on the
output of the whole model (not with --capture), and the time beside that of exact attention. Prints a table. --out also
writes report.html (a page for the browser), results.json (all figures, and the keys that a few queries keep),
pareto.png and pareto.pdf. With --demo, the defaults are --out out/demo and --lengths 512,1024,2048,4096.
"""

import argparse
from dataclasses import replace
from pathlib import Path
from typing import Any

from fewkeys.cli import inputs
from fewkeys.cli.files import deliver, printable, to_reader
from fewkeys.cli.options import add_common, add_inputs, add_value, budgets, named_path
from fewkeys.cli.progress import progress
from fewkeys.core.files import folder_of

RESULTS = "results.json"
PAGE = "report.html"
DEMO_OUT, DEMO_LENGTHS = Path("out", "demo"), [512, 1024, 2048, 4096]
SECONDS = 5.0
"""About how long whole models are timed at one length."""


def add_options(parser: argparse.ArgumentParser) -> None:
    add_inputs(parser, capture=True)
    slots = "slots per query: how many keys and stand-ins each query attends to"
    add_value(parser, "--slots", budgets, "16,32,64,128", slots, "N,N,...")
    lengths = (
        "also time a whole model of the same shape, with random weights, on one text of so many tokens: exact "
        "attention against the recommended plans and those of --plan"
    )
    parser.add_argument("--lengths", type=budgets, metavar="N,N,...", help=lengths)
    plan = "folder with a plan, written by save_pretrained or fewkeys tune, to compare too; may be repeated"
    parser.add_argument("--plan", action="append", type=named_path, default=[], metavar="DIR", help=plan)
    add_common(parser, "folder for the results", required=False)


def run(arguments: argparse.Namespace) -> None:
    if arguments.demo:
        arguments.out = arguments.out or DEMO_OUT
        arguments.lengths = arguments.lengths or DEMO_LENGTHS
    if arguments.capture and arguments.lengths:
        raise ValueError("--lengths: expected --model or --demo, got --capture, which has no model to time")
    inputs.prepare(arguments, *(["matplotlib"] if arguments.out else []))
    user_plans = {printable(folder_of(folder).absolute().name): inputs.open_plan(folder) for folder in arguments.plan}
    from fewkeys.judge.standard import OURS, standard_plans

    if len({**user_plans, **standard_plans(1)}) < len(arguments.plan) + len(standard_plans(1)):
        got = ", ".join(map(str, arguments.plan))
        raise ValueError(f"--plan: expected names that differ, also from the standard rows, got {got}; rename one")
    with progress() as step:
        captured, opened = inputs.read(arguments, step)

        from fewkeys.core.clock import Watch
        from fewkeys.integrations.compare import compare
        from fewkeys.integrations.effect import time_model
        from fewkeys.judge.result import WholeTime

        causal, length = captured.is_causal, captured.longest
        plans: dict[int | None, Any] = {
            slots: standard_plans(slots, is_causal=causal, length=length) for slots in arguments.slots
        }
        if user_plans:
            plans[None] = user_plans
        whole = {"model": opened.model, "batches": opened.batches or None}
        with inputs.named_as_options(plans="--plan"):
            report = compare(captured, plans, **whole, seed=arguments.seed, progress=step)
        lengths, times = arguments.lengths or [], []
        # A recommended plan that pays for every key is exact attention, without a budget, and has its time.
        wanted = {OURS, *user_plans}
        timed = [row for row in report.rows if row.name in wanted and row.name in plans.get(row.budget, {})]
        timed_plans, watch = [plans[row.budget][row.name] for row in timed], Watch()
        for number, length in enumerate(lengths):
            step(number, len(lengths), f"times of whole models at {length:,} tokens")
            timings = time_model(opened.model, timed_plans, length, seconds=SECONDS)
            times += [WholeTime(row.name, row.budget, length, *ms) for row, ms in zip(timed, timings, strict=True)]
        disturbed = bool(lengths) and watch.is_disturbed
    if report.sample is not None:
        report = replace(report, sample=replace(report.sample, tokens=opened.tokens))
    report = replace(report, whole_times=times).with_settings(text=opened.files, disturbed=disturbed)
    from fewkeys.report import print_table, save_figure
    from fewkeys.report.page import save_page

    def fill(folder: Path) -> None:
        save_figure(report, folder / "pareto.png")
        save_page(report, folder / PAGE)

    deliver(arguments, report.to_json(), lambda: print_table(report), RESULTS, fill)
    if arguments.out is not None and not arguments.json:
        with to_reader():
            print(f"Open {(arguments.out / PAGE).resolve().as_uri()}")
