"""Folders for results: checked before the work, and written completely or not at all."""

import argparse
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fewkeys.core.files import write_whole

STAGED = ".fewkeys-"
"""The beginning of the names of folders with files that are not finished; a killed process leaves them."""


def check_folder(out: Path) -> None:
    """`ValueError` if files cannot be written to `out`."""
    try:
        with tempfile.TemporaryDirectory(dir=_existing(out), prefix=STAGED):
            pass
    except OSError as error:
        raise ValueError(f"--out: expected a folder that can be written, got {out} ({error.strerror})") from error


def _existing(path: Path) -> Path:
    """`path` or its nearest ancestor that exists, be it a broken link."""
    path = path.absolute()
    return next(place for place in (path, *path.parents) if os.path.lexists(place))


def printable(path: str | Path) -> str:
    """A name as text: in Linux it may be bytes that are not UTF-8, which no file of text can hold."""
    return os.fsencode(path).decode(errors="backslashreplace")


def publish(out: Path, fill: Callable[[Path], None], last: str = "") -> list[str]:
    """Let `fill` write files to a folder within `out`, or within its nearest ancestor that exists: only there can files
    surely be written, and moved without copying. Then move them into `out`, `last` at the end. Returns their names.
    """
    staged = Path(tempfile.mkdtemp(dir=_existing(out), prefix=STAGED))
    try:
        fill(staged)
        names = sorted((path.name for path in staged.iterdir()), key=lambda name: (name == last, name))
        out.mkdir(parents=True, exist_ok=True)
        for name in names:
            os.replace(staged / name, out / name)
    finally:
        shutil.rmtree(staged, ignore_errors=True)
    return names


def deliver(
    arguments: argparse.Namespace,
    result: Mapping[str, Any] | str,
    show: Callable[[], None],
    name: str = "",
    fill: Callable[[Path], None] = lambda folder: None,
    last: str = "",
) -> None:
    """Write the JSON of the result to the file `name` in --out, if both are given, beside the files of `fill`; print it
    under --json, else call `show`.
    """
    text = result if isinstance(result, str) else json.dumps(result, indent=1, allow_nan=False) + "\n"

    def fill_all(folder: Path) -> None:
        write_whole(folder / name, text)
        fill(folder)

    names = publish(arguments.out, fill_all, last) if name and arguments.out is not None else []
    with to_reader():
        if arguments.json:
            print(text, end="")
            return
        show()
        if names:
            print(f"\nWritten: {', '.join(names)} in {arguments.out}")


@contextmanager
def to_reader() -> Iterator[None]:
    """Print all of it now. The reader of stdout may close it, as in `fewkeys ... | head`: the files are written."""
    try:
        yield
        print(end="", flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
