"""Folders for results: checked before the work begins, and written completely or not at all."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any


def check_folder(out: Path) -> None:
    """Raise before the work begins if files could not be written to `out`. Leaves no file behind."""
    if out.exists() and not out.is_dir():
        raise ValueError(f"--out: expected a folder, got a file: {out}")
    parent = _existing(out)
    try:
        with tempfile.TemporaryDirectory(dir=parent, prefix=".fewkeys-"):
            pass
    except OSError as error:
        raise ValueError(f"--out: expected a folder that can be written, got {out} ({error.strerror})") from error


def _existing(path: Path) -> Path:
    """`path` or its nearest ancestor that exists."""
    path = path.absolute()
    while not path.exists():
        path = path.parent
    return path


@contextmanager
def staging(out: Path) -> Iterator[Path]:
    """A folder on the same file system as `out`, removed afterwards unless it was renamed."""
    staged = Path(tempfile.mkdtemp(dir=_existing(out.parent), prefix=".fewkeys-"))
    try:
        staged.chmod(0o755)
        yield staged
    finally:
        shutil.rmtree(staged, ignore_errors=True)


def publish(out: Path, fill: Callable[[Path], None], last: str = "") -> list[str]:
    """Let `fill` write files to another folder, then move them into `out`, `last` at the end. Returns their names."""
    with staging(out) as staged:
        fill(staged)
        names = sorted((path.name for path in staged.iterdir()), key=lambda name: (name == last, name))
        out.mkdir(parents=True, exist_ok=True)
        for name in names:
            os.replace(staged / name, out / name)
    return names


def deliver(
    arguments: argparse.Namespace,
    result: Mapping[str, Any] | str,
    show: Callable[[], None],
    fill: Callable[[Path], None] | None = None,
    last: str = "",
) -> None:
    """Write the files of `fill` to `--out`, if given. Print the result as JSON under `--json`, else call `show`."""
    names = [] if fill is None or arguments.out is None else publish(arguments.out, fill, last)
    if arguments.json:
        print(as_json(result))
        return
    show()
    if names:
        print(f"\nWritten: {', '.join(names)} in {arguments.out}")


def as_json(result: Mapping[str, Any] | str) -> str:
    """The JSON text of a result, indented."""
    return result.rstrip() if isinstance(result, str) else json.dumps(result, indent=1, allow_nan=False)
