"""Folders for results: checked before any work is done, filled whole or not at all."""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path


def check_folder(out: Path) -> None:
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
def staging(out: Path) -> Iterator[Path]:
    """A folder on the same file system as `out`, gone afterwards unless it was renamed."""
    staged = Path(tempfile.mkdtemp(dir=_existing(out.parent), prefix=".fewkeys-"))
    try:
        staged.chmod(0o755)
        yield staged
    finally:
        shutil.rmtree(staged, ignore_errors=True)


def publish(out: Path, files: Mapping[str, Callable[[Path], None]]) -> None:
    """Write all files elsewhere first, then move them into `out`."""
    with staging(out) as staged:
        for name, write in files.items():
            write(staged / name)
        out.mkdir(parents=True, exist_ok=True)
        for name in files:
            os.replace(staged / name, out / name)


def picture(name: str, draw: Callable[[Path], None]) -> dict[str, Callable[[Path], None]]:
    """The files of a picture: `draw` writes its PDF beside the PNG that it is asked for."""
    return {f"{name}.png": draw, f"{name}.pdf": lambda _: None}


def deliver(
    arguments: argparse.Namespace, files: Mapping[str, Callable[[Path], None]], text: str, show: Callable[[], None]
) -> None:
    """Write the files to `--out`, if it is named; print `text` under `--json`, else what `show` prints."""
    if arguments.out is not None:
        publish(arguments.out, files)
    if arguments.json:
        print(text, end="")
        return
    show()
    if arguments.out is not None:
        print(f"\nWritten: {', '.join(files)} in {arguments.out}")
