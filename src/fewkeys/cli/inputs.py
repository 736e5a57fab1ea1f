"""The inputs of commands: required packages, models, captures, plans and texts."""

from __future__ import annotations

import argparse
import gzip
import sys
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import fewkeys.demo as demo
from fewkeys.cli.files import check_folder, printable
from fewkeys.cli.progress import Step
from fewkeys.core.files import folder_of

if TYPE_CHECKING:
    from torch import Tensor

    from fewkeys.captures.capture import Capture
    from fewkeys.model_plan import ModelPlan
    from fewkeys.plan import Plan

EXTRAS = {
    "transformers": "hf",
    "sentence_transformers": "embed",
    "matplotlib": "report",
    "sklearn": "train",
    demo.PACKAGE: "demo",
}
"""The extra that installs a module."""


class Opened(NamedTuple):
    """A model, batches of token ids, the names of the files, and the tokens of the first sequence as its tokenizer
    writes them. A stored capture has none of them.
    """

    model: Any
    batches: list[Tensor]
    files: list[str]
    tokens: list[str]


def prepare(arguments: argparse.Namespace, *modules: str) -> None:
    """Check that --out can be written, and that `modules` and those of the options are installed."""
    if arguments.out is not None:
        check_folder(arguments.out)
    options = {demo.PACKAGE: arguments.demo, "transformers": arguments.demo or arguments.model is not None}
    need(*modules, *(module for module, needed in options.items() if needed))


def need(*modules: str) -> None:
    """Raise `ValueError` with the extras to install if modules are missing."""
    if missing := sorted({name for name in modules if find_spec(name) is None}):
        extras = ",".join(sorted({EXTRAS[name] for name in missing}))
        raise ValueError(f"not installed: {', '.join(missing)}; pip install 'fewkeys[{extras}]'")


def open_model(arguments: argparse.Namespace, step: Step, tokens: int | None = None) -> Opened:
    """The model that the options name, and the text in sequences for it. tokens: wanted in all, by fewkeys bench."""
    files = arguments.text or ([demo.TEXT] if arguments.demo else None)
    if files is None:
        raise ValueError("--text: expected a UTF-8 file to read, got none; name one, or take --demo, which has a text")
    texts = _read_texts(files)
    step(0, 0, "loading the model")
    name = demo.NAME if arguments.demo else arguments.model
    folder = str(demo.model_folder()) if arguments.demo else name
    from fewkeys.integrations import text
    from fewkeys.integrations.transformers import load_model

    with named_as_options(name_or_dir="--model", length="--length", text="--text"):
        model, tokenizer = load_model(folder)
        longest = text.positions(model)
        if tokens is None:
            length, sequences = arguments.length, arguments.sequences
        else:
            length = min(tokens, 512, longest or 512)
            sequences = -(-tokens // length)
        batches = text.batches(texts, tokenizer, sequences=sequences, length=length, longest=longest)
    count = sum(map(len, batches))
    if count < sequences:
        step(0, 0, "")  # clears the line of progress
        note = f"the text holds {count} of {sequences} sequences of {length} tokens; using {count}"
        print(f"fewkeys: note: {note}", file=sys.stderr)
    model.config.name_or_path = printable(name)
    names = ["stdin" if str(path) == "-" else printable(path.name) for path in files]
    return Opened(model, batches, names, [*tokenizer.convert_ids_to_tokens(batches[0][0].tolist())])


def read(
    arguments: argparse.Namespace,
    step: Step,
    directory: Path | None = None,
    *,
    alpha: float | None = None,
    tokens: int | None = None,
) -> tuple[Capture, Opened]:
    """The capture that --capture names, else a new one. alpha: of the model's entmax, None for softmax."""
    if (folder := getattr(arguments, "capture", None)) is not None:
        if arguments.text:
            raise ValueError("--text: expected none beside --capture, which holds its own; drop one of the two")
        from fewkeys.captures.capture import Capture

        with named_as_options(directory="--capture"):
            return Capture.load(folder), Opened(None, [], [], [])
    opened = open_model(arguments, step, tokens)
    from fewkeys.core.weights import Entmax
    from fewkeys.integrations.transformers import capture

    weights, kind = (None, "exact") if alpha is None else (Entmax(alpha), "entmax")
    step(0, 1, f"{kind} attention of every layer")
    return capture(opened.model, opened.batches, directory, weights=weights), opened


def open_plan(folder: Path, option: str = "--plan") -> Plan | ModelPlan:
    from fewkeys import model_plan
    from fewkeys.plan import Plan

    folder = folder_of(folder)
    kind = model_plan.ModelPlan if (folder / model_plan.FILE).is_file() else Plan
    with named_as_options(**dict.fromkeys(("directory", "plan", "model plan"), option)):
        return kind.from_pretrained(folder)


@contextmanager
def named_as_options(**options: str) -> Iterator[None]:
    """Replace the Python argument at the beginning of an error by the option."""
    try:
        yield
    except ValueError as error:
        name, colon, rest = str(error).partition(":")
        raise ValueError(f"{options.get(name, name)}{colon}{rest}") from error


def _read_texts(paths: Sequence[Path]) -> list[str]:
    texts = []
    for path in paths:
        try:
            data = sys.stdin.buffer.read() if str(path) == "-" else path.read_bytes()
            texts.append((gzip.decompress(data) if path.suffix == ".gz" else data).decode("utf-8-sig"))
        except UnicodeDecodeError as error:
            raise ValueError(f"--text: expected UTF-8 text, got other bytes in {path}; convert it") from error
        except (OSError, EOFError, zlib.error) as error:  # the last two of damaged gzip
            reason = getattr(error, "strerror", None) or error
            raise ValueError(f"--text: expected a text file, plain or gzip, got {path} ({reason})") from error
    if not any(text.strip() for text in texts):
        raise ValueError(f"--text: expected some text, got only empty files: {', '.join(map(str, paths))}")
    return texts
