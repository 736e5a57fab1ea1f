"""`fewkeys compare`: judge approximations on a model and a text."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from typing import Any

from fewkeys.cli import inputs
from fewkeys.cli.files import check_folder, publish
from fewkeys.cli.options import add_impl, budgets, share, whole
from fewkeys.cli.progress import progress


def add_to(commands: Any) -> None:
    """Add the command to the parser's subcommands."""
    parser = commands.add_parser(
        "compare",
        help="judge approximations of attention on a model and a text",
        description="Judge approximations of attention on a model and a text: error of the attention output, effect on "
        "the whole model, time against exact attention. Prints a table; --out also writes results.json and pareto.png.",
    )
    inputs.add_model(parser)
    inputs.add_text(parser)
    parser.add_argument(
        "--slots", type=budgets, default=[16, 32, 64, 128], metavar="N,N,...",
        help="slots per query: keys and stand-ins that a query may pay (default 16,32,64,128)",
    )  # fmt: skip
    parser.add_argument("--out", type=Path, metavar="DIR", help="folder for results.json and pareto.png")
    parser.add_argument("--eps", type=share, default=0.05, help="weights at or above it count in recall (default 0.05)")
    parser.add_argument("--seed", type=whole, default=0, help="seed of random plans (default 0)")
    add_impl(parser)
    parser.add_argument("--json", action="store_true", help="print the JSON instead of the table")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    """Compare, print, and write what --out asks for."""
    files = inputs.text_files(arguments)
    texts = inputs.read_texts(files)
    if arguments.out is not None:
        check_folder(arguments.out)
        inputs.need("matplotlib", "report")
    if not arguments.json:
        inputs.need("rich", "report")
    with progress() as step:
        model, batches, name = inputs.open_model(arguments, texts, step)

        from fewkeys.integrations.compare import compare
        from fewkeys.integrations.transformers import capture
        from fewkeys.judge.standard import standard_plans

        step(0, 1, "exact attention of every layer")
        captured = capture(model, batches)
        plans = {
            slots: standard_plans(
                slots, is_causal=captured.is_causal, head_dim=captured.head_dim, length=arguments.length
            )
            for slots in arguments.slots
        }
        report = compare(
            captured,
            plans,
            model=model,
            batches=batches,
            eps=arguments.eps,
            impl=arguments.impl,
            seed=arguments.seed,
            progress=step,
        )
    report = replace(report, model=name).with_settings(text=[path.name for path in files])
    if arguments.out is not None:
        from fewkeys.report.figure import save_figure

        publish(arguments.out, {"results.json": report.save, "pareto.png": lambda path: save_figure(report, path)})
    if arguments.json:
        print(report.to_json(), end="")
    else:
        from fewkeys.report.table import print_table

        print_table(report)
        if arguments.out is not None:
            print(f"\nWritten: {arguments.out / 'results.json'} and {arguments.out / 'pareto.png'}")
