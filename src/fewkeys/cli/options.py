"""Numbers as command-line options."""

from __future__ import annotations

import argparse
import os
from typing import get_args

from fewkeys.core.impl import Impl

MOST_THREADS = max(256, os.cpu_count() or 1)


def add_impl(parser: argparse.ArgumentParser) -> None:
    """The option that names the executor."""
    parser.add_argument(
        "--impl", choices=get_args(Impl), default="auto",
        help="which code runs the plans (default auto: compiled kernels where they suit, else torch)",
    )  # fmt: skip


def positive(text: str) -> int:
    """A whole number of at least 1."""
    return _number(text, 1)


def whole(text: str) -> int:
    """A whole number of at least 0."""
    return _number(text, 0)


def threads(text: str) -> int:
    """A number of processor threads: at most `MOST_THREADS`; systems end a process that asks for very many."""
    return _number(text, 1, MOST_THREADS)


def _number(text: str, least: int, most: int | None = None) -> int:
    try:
        value = int(text)
    except ValueError:
        value = least - 1
    if value < least or (most is not None and value > most):
        wanted = f">= {least}" if most is None else f"from {least} to {most}"
        raise argparse.ArgumentTypeError(f"expected a whole number {wanted}, got {text!r}")
    return value


def share(text: str) -> float:
    """A number above 0 and at most 1."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0.0 < value <= 1.0:
        raise argparse.ArgumentTypeError(f"expected a number in (0, 1], got {text!r}")
    return value


def above_zero(text: str) -> float:
    """A finite number above 0."""
    return _real(text, 0)


def above_one(text: str) -> float:
    """A finite number above 1."""
    return _real(text, 1)


def _real(text: str, above: int) -> float:
    try:
        value = float(text)
    except ValueError:
        value = float("nan")
    if not above < value < float("inf"):
        raise argparse.ArgumentTypeError(f"expected a number > {above}, got {text!r}")
    return value


def budgets(text: str) -> list[int]:
    """Whole numbers of at least 1, with commas, sorted."""
    try:
        values = sorted({int(part) for part in text.split(",")})
    except ValueError:
        values = []
    if not values or values[0] < 1:
        raise argparse.ArgumentTypeError(f"expected whole numbers >= 1 with commas, such as 16,32,64, got {text!r}")
    return values
