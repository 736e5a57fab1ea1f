"""Folders for results, checked before the work; and the results, written and printed."""

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fewkeys.core.files import write_whole


def check_folder(out: Path) -> None:
    """`ValueError` if files cannot be written to `out`, or to its nearest ancestor that exists."""
    path = out.absolute()
    existing = next(place for place in (path, *path.parents) if os.path.lexists(place))  # a broken link is no folder
    try:
        with tempfile.TemporaryDirectory(dir=existing):
            pass
    except OSError as error:
        raise ValueError(f"--out: expected a folder that can be written, got {out} ({error.strerror})") from error


def printable(path: str | Path) -> str:
    """A name as text: in Linux it may be bytes that are not UTF-8, which no file of text can hold."""
    return os.fsencode(path).decode(errors="backslashreplace")


def deliver(
    arguments: argparse.Namespace,
    result: Mapping[str, Any] | str,
    show: Callable[[], None],
    name: str = "",
    fill: Callable[[Path], None] = lambda folder: None,
) -> None:
    """Write the JSON of the result, as `name`, and the files of `fill` to --out, if both are given; print it under
    --json, else call `show`. The JSON comes first: no failure to draw pictures loses it.
    """
    text = result if isinstance(result, str) else json.dumps(result, indent=1, allow_nan=False) + "\n"
    is_written = name and arguments.out is not None
    if is_written:
        arguments.out.mkdir(parents=True, exist_ok=True)
        write_whole(arguments.out / name, text)
        fill(arguments.out)
    with to_reader():
        if arguments.json:
            print(text, end="")
            return
        show()
        if is_written:
            print(f"\nWritten to {arguments.out}")


@contextmanager
def to_reader() -> Iterator[None]:
    """Print all of it now. The reader of stdout may close it, as in `fewkeys ... | head`: the files are written."""
    try:
        yield
        print(end="", flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
