"""`fewkeys capture`: store the queries, keys and values of a model on a text."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

from fewkeys.cli import inputs
from fewkeys.cli.files import staging
from fewkeys.cli.options import add_common, add_model, add_size, add_text
from fewkeys.cli.progress import progress
from fewkeys.core.files import write_whole


def add_to(commands: Any) -> None:
    """Add the command to the parser's subcommands."""
    parser = commands.add_parser(
        "capture",
        help="store the queries, keys and values of every layer",
        description="Run a model over a text and store the queries, keys and values of every layer as safetensors.",
    )
    add_model(parser)
    add_text(parser)
    add_size(parser)
    add_common(parser, "new folder for the capture", seed=False)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    """Capture, and print what was stored."""
    inputs.prepare(arguments, table=False)
    out: Path = arguments.out
    if out.exists() and any(out.iterdir()):
        raise ValueError(f"--out: expected a new or empty folder, got {out} with files in it; name another one")
    with progress() as step:
        opened = inputs.open_model(arguments, step)

        from fewkeys.integrations.transformers import capture

        step(0, 1, "exact attention of every layer")
        with staging(out) as staged:
            captured = capture(opened.model, opened.batches, staged)
            write_whole(staged / inputs.OPENED, json.dumps({"model": opened.name}))
            out.parent.mkdir(parents=True, exist_ok=True)
            if out.exists():
                out.rmdir()
            os.rename(staged, out)
    facts = {"model": opened.name, "directory": str(out), "layers": captured.layers, "sequences": captured.sequences}
    if arguments.json:
        print(json.dumps(facts, indent=1))
    else:
        print(f"Stored {captured.layers} layers, {captured.sequences} sequences of {opened.name} in {out}")
