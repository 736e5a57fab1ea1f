"""A progress bar, or lines where there is no terminal."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from time import monotonic

Step = Callable[[int, int, str], None]


@contextmanager
def progress() -> Iterator[Step]:
    """A progress bar on stderr; where that is no terminal, or rich is missing, one line for each new step. Both
    show the time left: that of the steps with the same total.

    A step of total 0 is set-up, which may still find the input wrong: it shows only in the bar, so that a refusal
    stays one line.
    """
    if not sys.stderr.isatty() or find_spec("rich") is None:
        last, size, start = "", 0, 0.0

        def say(done: int, total: int, what: str) -> None:
            nonlocal last, size, start
            if total != size:
                size, start = total, monotonic()
            if total and what != last:
                last = what
                print(f"fewkeys: {what}{_left(done / total, monotonic() - start)}", file=sys.stderr, flush=True)

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


def _left(share: float, seconds: float) -> str:
    """The time left after `seconds` for a share of the work; nothing before a tenth and at the end."""
    return f", about {seconds / share - seconds:,.0f} s left" if 0.1 <= share < 1 else ""
