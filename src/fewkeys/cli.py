"""The command `fewkeys`: which approximation of attention to use on a model, and at which budget.

Results go to stdout; progress and errors to stderr. Exit codes: 0 done, 2 bad input (one line says what and how to mend
it), 130 interrupted. Files appear complete or not at all.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from torch import Tensor

Step = Callable[[int, int, str], None]


class _Parser(argparse.ArgumentParser):
    """Reports bad usage as one line, like every other error."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(f"{message} (try {self.prog} --help)")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    try:
        arguments = _parser().parse_args(argv)
        arguments.run(arguments)
    except KeyboardInterrupt:
        print("fewkeys: interrupted; nothing was written", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader of stdout has left, as in `fewkeys ... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        return _fail(f"{error.filename}: {error.strerror}" if error.filename else str(error))
    except (ValueError, ImportError) as error:
        return _fail(str(error))
    return 0


def _fail(message: str) -> int:
    print("fewkeys: error:", " ".join(message.split()), file=sys.stderr)
    return 2


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="fewkeys", description="Attention with few keys: what each approximation costs on your model."
    )
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)

    compare = commands.add_parser(
        "compare",
        help="judge approximations of attention on a model and a text",
        description="Judge approximations of attention on a model and a text: error of the attention output, effect on "
        "the whole model, time against exact attention. Prints a table; --out also writes results.json and pareto.png.",
    )
    which = compare.add_mutually_exclusive_group(required=True)
    which.add_argument("--model", metavar="ID_OR_DIR", help="Hugging Face model folder or hub id")
    which.add_argument("--demo", action="store_true", help="all-MiniLM-L6-v2, as installed by fewkeys[demo]")
    _add_text(compare)
    compare.add_argument(
        "--slots", type=_budgets, default=[16, 32, 64, 128], metavar="N,N,...",
        help="slots per query: keys and stand-ins that a query may pay (default 16,32,64,128)",
    )  # fmt: skip
    compare.add_argument("--out", type=Path, metavar="DIR", help="folder for results.json and pareto.png")
    compare.add_argument(
        "--eps", type=_share, default=0.05, help="weights at or above it count in recall (default 0.05)"
    )
    compare.add_argument("--seed", type=_whole, default=0, help="seed of random plans (default 0)")
    compare.add_argument("--json", action="store_true", help="print the JSON instead of the table")
    compare.set_defaults(run=_compare)

    capture = commands.add_parser(
        "capture",
        help="store the queries, keys and values of every layer",
        description="Run a model over a text and store the queries, keys and values of every layer as safetensors.",
    )
    capture.add_argument("--model", required=True, metavar="ID_OR_DIR", help="Hugging Face model folder or hub id")
    _add_text(capture)
    capture.add_argument("--out", type=Path, required=True, metavar="DIR", help="new folder for the capture")
    capture.add_argument("--json", action="store_true", help="print what was stored as JSON")
    capture.set_defaults(run=_capture)
    return parser


def _add_text(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--text", action="append", required=True, type=Path, metavar="FILE", help="UTF-8 text; repeat it to join files"
    )
    parser.add_argument("--sequences", type=_positive, default=8, metavar="N", help="sequences to read (default 8)")
    parser.add_argument("--length", type=_positive, default=512, metavar="N", help="tokens per sequence (default 512)")
    parser.add_argument("--threads", type=_positive, metavar="N", help="processor threads (default: all)")


def _compare(arguments: argparse.Namespace) -> None:
    texts = _read(arguments.text)
    if arguments.out is not None:
        _check_folder(arguments.out)
        _need("matplotlib", "report")
    if not arguments.json:
        _need("rich", "report")
    with _progress() as step:
        model, batches, name = _open(arguments, texts, step)

        from fewkeys.integrations.transformers import capture
        from fewkeys.measure.compare import compare
        from fewkeys.measure.standard import standard_plans

        step(0, 1, "exact attention of every layer")
        captured = capture(model, batches)
        plans = {
            slots: standard_plans(
                slots, is_causal=captured.is_causal, head_dim=captured.head_dim, length=arguments.length
            )
            for slots in arguments.slots
        }
        report = compare(
            captured, plans, model=model, batches=batches, eps=arguments.eps, seed=arguments.seed, progress=step
        )
    report = replace(report, model=name).with_settings(text=[path.name for path in arguments.text])
    if arguments.out is not None:
        from fewkeys.report.figure import save_figure

        _publish(arguments.out, {"results.json": report.save, "pareto.png": lambda path: save_figure(report, path)})
    if arguments.json:
        print(report.to_json(), end="")
    else:
        from fewkeys.report.table import print_table

        print_table(report)
        if arguments.out is not None:
            print(f"\nWritten: {arguments.out / 'results.json'} and {arguments.out / 'pareto.png'}")


def _capture(arguments: argparse.Namespace) -> None:
    texts = _read(arguments.text)
    out: Path = arguments.out
    _check_folder(out)
    if out.exists() and any(out.iterdir()):
        raise ValueError(f"--out: expected a new or empty folder, got {out} with files in it; name another one")
    with _progress() as step:
        model, batches, name = _open(arguments, texts, step)

        from fewkeys.integrations.transformers import capture

        step(0, 1, "exact attention of every layer")
        with _staging(out) as staged:
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


def _open(arguments: argparse.Namespace, texts: list[str], step: Step) -> tuple[Any, list[Tensor], str]:
    """The model, the batches of token ids and the model's name."""
    _need("transformers", "hf")
    name = arguments.model
    if getattr(arguments, "demo", False):
        from fewkeys import demo

        step(0, 0, "checking the demo model")
        folder, name = str(demo.model_folder()), demo.NAME
    else:
        folder = name
    step(0, 0, "loading the model")
    import torch

    from fewkeys.integrations import text
    from fewkeys.integrations.transformers import load_model

    if arguments.threads is not None:
        torch.set_num_threads(arguments.threads)
    with _named_as_options(name_or_dir="--model", length="--length", text="--text"):
        model, tokenizer = load_model(folder)
        batches = text.batches(
            texts,
            tokenizer,
            sequences=arguments.sequences,
            length=arguments.length,
            longest=text.positions(model),
        )
    count = sum(len(batch) for batch in batches)
    if count < arguments.sequences:
        note = f"the text holds {count} of {arguments.sequences} sequences of {arguments.length} tokens; using {count}"
        print(f"fewkeys: note: {note}", file=sys.stderr)
    return model, batches, name


@contextmanager
def _named_as_options(**options: str) -> Iterator[None]:
    """Errors that name a Python argument name the command-line option instead."""
    try:
        yield
    except ValueError as error:
        name, colon, rest = str(error).partition(":")
        raise ValueError(f"{options.get(name, name)}{colon}{rest}") from error


def _read(paths: list[Path]) -> list[str]:
    """The texts of the files."""
    texts = []
    for path in paths:
        if not path.is_file():
            got = "a folder" if path.is_dir() else "no such file"
            raise ValueError(f"--text: expected a text file, got {got}: {path}")
        try:
            texts.append(path.read_text(encoding="utf-8"))
        except UnicodeDecodeError as error:
            raise ValueError(f"--text: expected UTF-8 text, got other bytes in {path}; convert it") from error
    if not any(text.strip() for text in texts):
        raise ValueError(f"--text: expected some text, got only empty files: {', '.join(map(str, paths))}")
    return texts


def _need(module: str, extra: str) -> None:
    if find_spec(module) is None:
        raise ValueError(f"{module} is needed for this and is not installed; pip install 'fewkeys[{extra}]'")


def _check_folder(out: Path) -> None:
    """Raise before any work is done if files could not be written to `out`; leaves nothing behind."""
    if out.exists() and not out.is_dir():
        raise ValueError(f"--out: expected a folder, got a file: {out}")
    parent = _existing(out)
    try:
        with tempfile.TemporaryDirectory(dir=parent, prefix=".fewkeys-"):
            pass
    except OSError as error:
        raise ValueError(f"--out: expected a folder that can be written, got {out} ({error.strerror})") from error


def _existing(path: Path) -> Path:
    """The nearest ancestor of `path`, or itself, that exists."""
    path = path.absolute()
    while not path.exists():
        path = path.parent
    return path


@contextmanager
def _staging(out: Path) -> Iterator[Path]:
    """A folder on the same file system as `out`, gone afterwards unless it was renamed."""
    staged = Path(tempfile.mkdtemp(dir=_existing(out.parent), prefix=".fewkeys-"))
    try:
        staged.chmod(0o755)
        yield staged
    finally:
        shutil.rmtree(staged, ignore_errors=True)


def _publish(out: Path, files: Mapping[str, Callable[[Path], None]]) -> None:
    """Write all files elsewhere first, then move them into `out`."""
    with _staging(out) as staged:
        for name, write in files.items():
            write(staged / name)
        out.mkdir(parents=True, exist_ok=True)
        for name in files:
            os.replace(staged / name, out / name)


@contextmanager
def _progress() -> Iterator[Step]:
    """A progress bar on stderr; where that is no terminal, or rich is missing, one line for each new step.

    A step of total 0 is set-up, which may still find the input wrong: it shows only in the bar, so that a refusal
    stays one line.
    """
    if not sys.stderr.isatty() or find_spec("rich") is None:
        last = ""

        def say(done: int, total: int, what: str) -> None:
            nonlocal last
            if total and what != last:
                last = what
                print(f"fewkeys: {what}", file=sys.stderr, flush=True)

        yield say
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("starting", total=None)

        def show(done: int, total: int, what: str) -> None:
            bar.update(task, completed=done, total=total if done else None, description=what)

        yield show


def _positive(text: str) -> int:
    return _number(text, 1)


def _whole(text: str) -> int:
    return _number(text, 0)


def _number(text: str, least: int) -> int:
    try:
        value = int(text)
    except ValueError:
        value = least - 1
    if value < least:
        raise argparse.ArgumentTypeError(f"expected a whole number >= {least}, got {text!r}")
    return value


def _share(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0.0 < value <= 1.0:
        raise argparse.ArgumentTypeError(f"expected a number in (0, 1], got {text!r}")
    return value


def _budgets(text: str) -> list[int]:
    try:
        values = sorted({int(part) for part in text.split(",")})
    except ValueError:
        values = []
    if not values or values[0] < 1:
        raise argparse.ArgumentTypeError(f"expected whole numbers >= 1 with commas, such as 16,32,64, got {text!r}")
    return values
