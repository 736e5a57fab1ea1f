"""Run a model over a text and store the queries, keys and values of every layer as safetensors."""

import argparse
from pathlib import Path
from typing import Any

from fewkeys.cli import inputs
from fewkeys.cli.files import STAGED, deliver, printable, publish
from fewkeys.cli.options import add_common, add_inputs
from fewkeys.cli.progress import progress
from fewkeys.core.files import write_json


def add_options(parser: argparse.ArgumentParser) -> None:
    add_inputs(parser)
    add_common(parser, "new folder for the capture", seed=False)


def run(arguments: argparse.Namespace) -> None:
    inputs.prepare(arguments)
    out: Path = arguments.out
    if printable(out) != str(out):
        raise ValueError(f"--out: expected a name in UTF-8, as safetensors does, got {printable(out)}; rename it")
    if out.exists() and not all(path.name.startswith(STAGED) for path in out.iterdir()):
        raise ValueError(f"--out: expected a new or empty folder, got {out} with files in it; name another one")
    from fewkeys.captures.capture import INDEX

    facts: dict[str, Any] = {}
    with progress() as step:

        def fill(folder: Path) -> None:
            captured, opened = inputs.read(arguments, step, folder)
            facts.update(model=opened.name, directory=str(out), layers=captured.layers, sequences=captured.sequences)
            write_json(folder, inputs.OPENED, {"model": opened.name, "tokens": opened.tokens})

        publish(out, fill, last=INDEX)
    stored = "Stored {layers} layers, {sequences} sequences of {model} in {directory}".format(**facts)
    deliver(arguments, facts, lambda: print(stored))
