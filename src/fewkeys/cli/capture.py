"""`fewkeys capture`: store the queries, keys and values of a model on a text."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

from fewkeys.cli import inputs
from fewkeys.cli.files import check_folder, staging
from fewkeys.cli.progress import progress


def add_to(commands: Any) -> None:
    """Add the command to the parser's subcommands."""
    parser = commands.add_parser(
        "capture",
        help="store the queries, keys and values of every layer",
        description="Run a model over a text and store the queries, keys and values of every layer as safetensors.",
    )
    parser.add_argument("--model", required=True, metavar="ID_OR_DIR", help="Hugging Face model folder or hub id")
    inputs.add_text(parser)
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="new folder for the capture")
    parser.add_argument("--json", action="store_true", help="print what was stored as JSON")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    """Capture, and print what was stored."""
    files = inputs.text_files(arguments)
    texts = inputs.read_texts(files)
    out: Path = arguments.out
    check_folder(out)
    if out.exists() and any(out.iterdir()):
        raise ValueError(f"--out: expected a new or empty folder, got {out} with files in it; name another one")
    with progress() as step:
        model, batches, name = inputs.open_model(arguments, texts, step)

        from fewkeys.integrations.transformers import capture

        step(0, 1, "exact attention of every layer")
        with staging(out) as staged:
            captured = capture(model, batches, staged)
            out.parent.mkdir(parents=True, exist_ok=True)
            if out.exists():
                out.rmdir()
            os.rename(staged, out)
    if arguments.json:
        import json

        facts = {"model": name, "directory": str(out), "layers": captured.layers, "sequences": captured.sequences}
        print(json.dumps(facts, indent=1))
    else:
        print(f"Stored {captured.layers} layers, {captured.sequences} sequences of {name} in {out}")
