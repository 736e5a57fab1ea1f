"""`fewkeys compare`: judge approximations on a model and a text."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fewkeys.cli import inputs
from fewkeys.cli.files import deliver
from fewkeys.cli.options import add_common, add_inputs, budgets, named_path
from fewkeys.cli.progress import Step, progress

if TYPE_CHECKING:
    from fewkeys.captures.capture import Capture
    from fewkeys.judge.result import Row, WholeTime
    from fewkeys.model_plan import ModelPlan
    from fewkeys.plan import Plan

RESULTS = "results.json"
"""What `fewkeys report` reads."""
PAGE = "report.html"
DEMO_OUT, DEMO_LENGTHS = Path("out", "demo"), [512, 1024, 2048, 4096]
SECONDS = 5.0
"""For the times of whole models at one length, about."""


def add_to(commands: Any) -> None:
    """Add the command to the parser's subcommands."""
    parser = commands.add_parser(
        "compare",
        help="measure approximations of attention on a model and a text",
        description="Measure approximations of attention on a model and a text: the error of the attention output, "
        "the effect on the output of the whole model (not with --capture), and the time beside that of exact "
        f"attention. Prints a table. --out also writes {PAGE} (a page for the browser), {RESULTS} (all figures, and "
        "the keys that a few queries keep), pareto.png and pareto.pdf. With --demo, the defaults are --out "
        f"{DEMO_OUT} and --lengths {','.join(map(str, DEMO_LENGTHS))}.",
    )
    add_inputs(parser, capture=True)
    parser.add_argument(
        "--slots", type=budgets, default=[16, 32, 64, 128], metavar="N,N,...",
        help="slots per query: how many keys and stand-ins each query attends to (default 16,32,64,128)",
    )  # fmt: skip
    parser.add_argument(
        "--lengths", type=budgets, metavar="N,N,...",
        help="also time a whole model of the same shape, with random weights, on one text of so many tokens: exact "
        "attention against the recommended plans and those of --plan",
    )  # fmt: skip
    parser.add_argument(
        "--plan", action="append", type=named_path, default=[], metavar="DIR",
        help="folder with a plan, written by save_pretrained or fewkeys tune, to compare too; may be repeated",
    )  # fmt: skip
    add_common(parser, "folder for the results", required=False)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    """Compare, print, and write what --out asks for."""
    if arguments.demo:
        arguments.out = arguments.out or DEMO_OUT
        arguments.lengths = arguments.lengths or DEMO_LENGTHS
    if arguments.capture and arguments.lengths:
        raise ValueError("--lengths: expected --model or --demo, got --capture, which has no model to time")
    inputs.prepare(arguments, *(() if arguments.out is None else ("matplotlib",)))
    user_plans = {folder.name: inputs.open_plan(folder) for folder in arguments.plan}
    if len(user_plans) < len(arguments.plan):
        raise ValueError(f"--plan: expected folders of different names, got {', '.join(map(str, arguments.plan))}")
    with progress() as step:
        opened = None if arguments.capture else inputs.open_model(arguments, step)

        from fewkeys.integrations.compare import compare
        from fewkeys.integrations.transformers import capture
        from fewkeys.judge.standard import OURS

        if opened is None:
            captured, tokens = inputs.open_capture(arguments)
            text, model, batches, name = [], None, None, captured.model_name
        else:
            step(0, 1, "exact attention of every layer")
            captured, tokens = capture(opened.model, opened.batches), opened.tokens
            text, model, batches, name = opened.files, opened.model, opened.batches, opened.name
        plans = _rows(captured, arguments.slots, user_plans)
        report = compare(captured, plans, model=model, batches=batches, seed=arguments.seed, progress=step)
        if arguments.lengths:
            timed = [row for row in report.rows if row.name == OURS or row.name in user_plans]
            each = [plans[row.budget][row.name] for row in timed]
            report = replace(report, whole_times=_whole_times(model, timed, each, arguments.lengths, step))
    if report.sample is not None:
        report = replace(report, sample=replace(report.sample, tokens=tokens))
    report = replace(report, model=name).with_settings(text=text)
    from fewkeys.report import print_table, save_figure
    from fewkeys.report.page import save_page

    def fill(folder: Path) -> None:
        report.save(folder / RESULTS)
        save_figure(report, folder / "pareto.png")
        save_page(report, folder / PAGE)

    deliver(arguments, report.to_json(), lambda: print_table(report), fill)
    if arguments.out is not None and not arguments.json:
        print(f"Open {(arguments.out / PAGE).resolve().as_uri()}")


def _whole_times(
    model: Any, rows: list[Row], plans: list[Plan | ModelPlan], lengths: list[int], step: Step
) -> list[WholeTime]:
    """Times of a model of this shape with random weights at each length: exact, and under the plan of each row."""
    from fewkeys.integrations.effect import time_model
    from fewkeys.judge.result import WholeTime

    times = []
    for number, length in enumerate(lengths):
        step(number, len(lengths), f"times of whole models at {length:,} tokens")
        timings = time_model(model, plans, length, seconds=SECONDS)
        for row, timing in zip(rows, timings, strict=True):
            times.append(WholeTime(row.name, row.budget, length, *timing))
    return times


def _rows(
    captured: Capture, slots: list[int], user_plans: dict[str, Plan | ModelPlan]
) -> dict[int | None, dict[str, Any]]:
    """The standard rows at every budget, and the user's."""
    from fewkeys.judge.standard import standard_plans

    length = max(call.key.shape[2] for call in captured.calls(0))
    rows: dict[int | None, dict[str, Any]] = {}
    for count in slots:
        plans = standard_plans(count, is_causal=captured.is_causal, head_dim=captured.head_dim, length=length)
        rows[count] = dict(plans)
    if taken := user_plans.keys() & rows[slots[0]].keys():
        raise ValueError(f"--plan: expected folders named unlike the standard rows, got {min(taken)!r}; rename it")
    return rows | ({None: user_plans} if user_plans else {})
