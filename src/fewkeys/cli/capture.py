"""Run a model over a text and store the queries, keys and values of every layer as safetensors."""

import argparse

from fewkeys.cli import inputs
from fewkeys.cli.files import deliver
from fewkeys.cli.options import add_common, add_inputs
from fewkeys.cli.progress import progress


def add_options(parser: argparse.ArgumentParser) -> None:
    add_inputs(parser)
    add_common(parser, "new folder for the capture", seed=False)


def run(arguments: argparse.Namespace) -> None:
    inputs.prepare(arguments)
    if arguments.out.exists() and any(arguments.out.iterdir()):
        raise ValueError(f"--out: expected a new or empty folder, got {arguments.out} with files; name another one")
    with progress() as step:
        captured, _ = inputs.read(arguments, step, arguments.out)
    model, out, layers, sequences = captured.model_name, arguments.out, captured.layers, captured.sequences
    facts = {"model": model, "directory": str(out), "layers": layers, "sequences": sequences}
    deliver(arguments, facts, lambda: print(f"Stored {layers} layers, {sequences} sequences of {model} in {out}"))
