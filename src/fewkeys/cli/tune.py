"""Choose a plan for every head of a model: how many slots it has, and how many of them are kept keys and means. The
table compares the tuned plan, on held-out text, with the rows of fewkeys compare: fewkeys.budget, other methods,
controls, and oracles, which compute all scores. Writes model_plan.json (read by fewkeys.ModelPlan.from_pretrained),
tuned.json, tuned.png and tuned.pdf. Run the same command again to continue after an interruption.
"""

import argparse
import shutil
from typing import Any

from fewkeys.cli import inputs
from fewkeys.cli.files import deliver
from fewkeys.cli.options import add_common, add_inputs, add_value, number, whole
from fewkeys.cli.progress import progress

WORK = ".tuning"
"""The folder in --out for finished layers, removed at the end."""


def add_options(parser: argparse.ArgumentParser) -> None:
    add_inputs(parser, sequences=12)
    goal = parser.add_mutually_exclusive_group()
    goal.add_argument("--slots", type=whole(), metavar="N", help="slots per query, mean over all heads (default 64)")
    error = "fewest slots with a mean relative output error of at most E"
    goal.add_argument("--max-error", type=number(), metavar="E", help=error)
    gradients = (
        "weight the error of a head by its effect on the model's predictions, by a backward pass for each batch; "
        "recommended for decoders (docs/tuning.md)"
    )
    parser.add_argument("--gradients", action="store_true", help=gradients)
    add_value(parser, "--held-out", number(), "0.25", "share of the sequences held out", "SHARE")
    add_common(parser, "folder for the results")
    parser.set_defaults(kept="finished layers")


def run(arguments: argparse.Namespace) -> None:
    inputs.prepare(arguments, "matplotlib")
    if arguments.slots is not None and arguments.slots >= arguments.length:
        raise ValueError(
            f"--slots: expected fewer than the {arguments.length} tokens of a sequence (--length), got "
            f"{arguments.slots}; that many keep every key"
        )
    with progress() as step:
        opened = inputs.open_model(arguments, step)
        model = opened.model

        import torch

        from fewkeys.integrations.compare import compare
        from fewkeys.integrations.transformers import capture
        from fewkeys.judge.standard import OURS, standard_plans
        from fewkeys.tuning.tune import tune

        sequences, size = torch.cat(opened.batches), len(opened.batches[0])
        count = min(len(sequences) - 1, max(1, round(arguments.held_out * len(sequences))))
        if count < 1:
            raise ValueError(
                "--text: expected at least 2 sequences, one to tune on and one held out, got 1; give more text or "
                "choose a smaller --length"
            )
        seen, held_out = sequences[:-count].split(size), sequences[-count:].split(size)
        step(0, 1, "exact attention of every layer")
        captured = capture(model, seen, gradients=arguments.gradients)
        work = arguments.out / WORK
        options = {name: getattr(arguments, name) for name in ("slots", "max_error", "seed")}
        plan = tune(captured, **options, directory=work, progress=step)
        paid = max(1, round(plan.record["slots"]))
        rows: dict[str, Any] = standard_plans(paid, is_causal=captured.is_causal, length=arguments.length)
        options = {"model": model, "batches": held_out, "seed": arguments.seed}
        report = compare(capture(model, held_out), {paid: {"tuned": plan, **rows}}, **options, progress=step)
    report = report.with_settings(text=opened.files, held_out=True)
    from fewkeys.report import print_table
    from fewkeys.report.figure import save_tuned

    def show() -> None:
        print_table(report)
        error, of_budget = (report.row(name).error for name in ("tuned", OURS))
        print(f"\nHeld-out error: tuned {error:.3f}, fewkeys.budget({paid}) {of_budget:.3f}.")

    plan.save_pretrained(arguments.out)
    deliver(arguments, report.to_json(), show, "tuned.json", lambda out: save_tuned(plan, report, out / "tuned.png"))
    shutil.rmtree(work, ignore_errors=True)
