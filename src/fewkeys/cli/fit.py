"""Train a Sparsefinder for a model with alpha-entmax attention. It learns projections of queries and keys that are
close where the attention weight is not zero. The table shows how many nonzero weights of the last sequences, which are
held out, several groupings predict, beside a window and random edges with as many keys. Writes the predictor (read by
Sparsefinder.from_pretrained) and fit.json. Run the same command again to continue after an interruption.
"""

import argparse
import shutil
from typing import Any

from fewkeys.cli import inputs
from fewkeys.cli.files import deliver
from fewkeys.cli.options import add_common, add_inputs, add_value, number, whole
from fewkeys.cli.progress import progress

WORK = ".fitting"
"""The folder in --out for the state of the fit, removed at the end."""
JUDGED = ("recall", "window", "random", "sparsity", "exact", "computation", "entropy")
DROP = ("entropy", "computation", "random", "window", "exact")
"""Columns that are left out in narrow terminals, in this order."""
NOTE = (
    "recall: share of the gold edges kept; window, random: the same by a window and by random edges that keep as many "
    "keys. sparsity: share of visible pairs left out; exact: queries with all their gold edges. computation: share of "
    "scores saved when groups are run whole; entropy: 1 when all groups are equally full."
)


def add_options(parser: argparse.ArgumentParser) -> None:
    add_inputs(parser, sequences=64, capture=True)
    add_value(parser, "--rank", whole(), 4, "dimensions of the projections", "R")
    add_value(parser, "--alpha", number(1.0, 2.0), "1.5", "alpha of the model's entmax", "ALPHA")
    add_value(parser, "--epochs", whole(), 3, "passes over the text")
    add_value(parser, "--margin", number(1e-6, 1e6), 1, "margin of the hinge loss", "M")
    add_value(parser, "--lr", number(most=1e6), "0.001", "learning rate of Adam", "LR")
    add_value(parser, "--batch", whole(), 32, "sequences per step")
    separate = "separate projections for queries and keys (default: one for both)"
    parser.add_argument("--separate", dest="shared", action="store_false", help=separate)
    add_value(parser, "--held-out", number(), "0.2", "share of the sequences held out", "SHARE")
    add_common(parser, "folder for the predictor")
    parser.set_defaults(kept="finished layers")


def run(arguments: argparse.Namespace) -> None:
    inputs.prepare(arguments, "sklearn")
    with progress() as step:
        captured, _ = inputs.read(arguments, step, alpha=arguments.alpha)

        from fewkeys.papers.sparsefinder.held_out import fit_and_judge

        work = arguments.out / WORK
        names = ("rank", "alpha", "shared", "margin", "lr", "epochs", "batch", "seed")
        settings = {name: getattr(arguments, name) for name in names}
        with inputs.named_as_options(share="--held-out"):
            finder, report = fit_and_judge(captured, arguments.held_out, directory=work, progress=step, **settings)
    finder.save_pretrained(arguments.out)
    deliver(arguments, report, lambda: _print_table(report), "fit.json")
    shutil.rmtree(work, ignore_errors=True)


def _print_table(report: dict[str, Any]) -> None:
    from fewkeys.report.table import show

    def cells(row: dict[str, Any]) -> dict[str, str]:
        shown = {name: "-" if row[name] is None else f"{row[name]:.3f}" for name in JUDGED}
        return {f"grouping + window {report['window']}": row["name"], "space": row["space"], **shown}

    title = "{held_out} held-out sequences, fitted on {seen}".format(**report["sequences"])
    print(show([cells(row) for row in report["rows"]], title=title, notes={"space": NOTE}, drop=DROP))
