"""The command `fewkeys`: which approximation of attention to use on a model, and at which budget.

Results go to stdout; progress and errors to stderr. Exit codes: 0 done, 2 bad input (one line says what and how to mend
it), 130 interrupted, 143 terminated. Each file appears complete or not at all.
"""

import argparse
import io
import signal
import sys
import threading
from collections.abc import Sequence
from difflib import get_close_matches
from typing import Any, NoReturn

from fewkeys.cli import bench, capture, compare, doctor, embed, fit, report, tune
from fewkeys.core.version import VERSION

COMMANDS = {
    embed: "embed the texts of files and folders: one vector for each text, or for each part",
    compare: "measure approximations of attention on a model and a text",
    report: "show the results of fewkeys compare, as a table or an HTML page",
    tune: "choose a plan for every head of a model",
    fit: "train a Sparsefinder, which predicts the nonzero weights of entmax attention",
    bench: "time plans against exact attention",
    capture: "store the queries, keys and values of every layer",
    doctor: "print versions, processor and kernels, and from which length plans are faster here",
}
"""The modules of the commands: `add_options` declares the options, `run` does the work, --help shows the docstring."""


class _Parser(argparse.ArgumentParser):
    """Reports bad usage as one line, like every other error."""

    _words: Sequence[str] = ()

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        self._words = sys.argv[1:] if args is None else args
        known, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        return known, unknown

    def error(self, message: str) -> NoReturn:
        options = [name for name in self._option_string_actions if name.startswith("--")]
        for name in (word.partition("=")[0] for word in self._words if word.startswith("--")):
            is_known = any(option.startswith(name) for option in options)  # argparse takes abbreviations
            if not is_known and (near := get_close_matches(name, options, 1, 0.7)):
                message = f"unknown option {name}; did you mean {near[0]}?"
                break
        raise ValueError(f"{message} (try {self.prog} --help)")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return its exit code."""
    kept = None
    sys.stderr = sys.stderr or io.StringIO()  # closed, as by `2>&-`: notes must not go to stdout
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # an encoding without rules of tables, or without names of files
    try:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, _exit)
        arguments = parser().parse_args(argv)
        kept = getattr(arguments, "kept", None)
        if getattr(arguments, "threads", None) is not None:
            import torch

            torch.set_num_threads(arguments.threads)
        arguments.run(arguments)
    except KeyboardInterrupt:
        goes_on = f"; {kept} are kept, the same command goes on from there" if kept else ""
        print(f"fewkeys: interrupted{goes_on}", file=sys.stderr)
        return 130
    except (OSError, ValueError, ImportError) as error:
        message = str(error)
        if isinstance(error, OSError) and error.filename:
            message = f"{error.filename}: {error.strerror}"
        print("fewkeys: error:", " ".join(message.split()), file=sys.stderr)
        return 2
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and "can't allocate memory" not in str(error):  # torch's own
            raise
        print("fewkeys: error: expected more memory; give shorter texts, or ask for less", file=sys.stderr)
        return 2
    return 0


def _exit(number: int, frame: object) -> NoReturn:
    """On SIGTERM: an exception, so that temporary captures are removed and finished work is kept."""
    sys.exit(128 + number)


def parser() -> argparse.ArgumentParser:
    purpose = "Embed long texts faster on a CPU, and measure what approximations of attention cost on your model."
    program = _Parser(prog="fewkeys", description=purpose)
    program.add_argument("--version", action="version", version=f"fewkeys {VERSION}")
    commands = program.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for command, meaning in COMMANDS.items():
        name = command.__name__.rpartition(".")[2]
        inner = commands.add_parser(name, help=meaning, description=command.__doc__)
        command.add_options(inner)
        inner.set_defaults(run=command.run)
    return program
