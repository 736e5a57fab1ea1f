"""What every command starts from: a model, its tokenizer, and a text."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import fewkeys.demo as demo
from fewkeys.cli.options import positive, threads
from fewkeys.cli.progress import Step

if TYPE_CHECKING:
    from torch import Tensor


def add_model(parser: argparse.ArgumentParser, group: Any = None) -> None:
    """Options that name the model; in `group`, where something else may take its place."""
    which = parser.add_mutually_exclusive_group(required=True) if group is None else group
    which.add_argument("--model", metavar="ID_OR_DIR", help="Hugging Face model folder or hub id")
    which.add_argument(
        "--demo", action="store_true", help="all-MiniLM-L6-v2, as installed by fewkeys[demo], and a text of its own"
    )


def add_text(parser: argparse.ArgumentParser, sequences: int = 8) -> None:
    """Options that name the text and how much of it is read."""
    parser.add_argument(
        "--text",
        action="append",
        type=Path,
        metavar="FILE",
        help="UTF-8 text; repeat it to join files (default with --demo: a fixed text)",
    )
    parser.add_argument(
        "--sequences", type=positive, default=sequences, metavar="N", help=f"sequences to read (default {sequences})"
    )
    parser.add_argument("--length", type=positive, default=512, metavar="N", help="tokens per sequence (default 512)")
    parser.add_argument("--threads", type=threads, metavar="N", help="processor threads (default: all)")


def open_model(arguments: argparse.Namespace, texts: list[str], step: Step) -> tuple[Any, list[Tensor], str]:
    """The model, the batches of token ids and the model's name."""
    need("transformers", "hf")
    name = arguments.model
    if getattr(arguments, "demo", False):
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
            texts, tokenizer, sequences=arguments.sequences, length=arguments.length, longest=text.positions(model)
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


def text_files(arguments: argparse.Namespace) -> list[Path]:
    """The files that `--text` names; the demo has one of its own."""
    if arguments.text:
        named: list[Path] = arguments.text
        return named
    if getattr(arguments, "demo", False):
        return [demo.TEXT]
    raise ValueError("--text: expected a UTF-8 file to read, got none; name one, or take --demo, which has a text")


def read_texts(paths: list[Path]) -> list[str]:
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


def need(module: str, extra: str) -> None:
    """Raise `ValueError` naming the extra to install where `module` is missing."""
    if find_spec(module) is None:
        raise ValueError(f"{module} is needed for this and is not installed; pip install 'fewkeys[{extra}]'")
