"""A progress bar, or lines where there is no terminal."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec

Step = Callable[[int, int, str], None]


@contextmanager
def progress() -> Iterator[Step]:
    """A progress bar on stderr; where that is no terminal, or rich is missing, one line for each new step.

    A step of total 0 is set-up, which may still find the input wrong: it shows only in the bar, so that a refusal
    stays one line.
    """
    if not sys.stderr.isatty() or find_spec("rich") is None:
        last = ""

        def say(done: int, total: int, what: str) -> None:
            nonlocal last
            if total and what != last:
                last = what
                print(f"fewkeys: {what}", file=sys.stderr, flush=True)

        yield say
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("starting", total=None)

        def show(done: int, total: int, what: str) -> None:
            bar.update(task, completed=done, total=total if done else None, description=what)

        yield show
