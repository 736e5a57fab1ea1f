"""The progress of a command, with the time left."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import monotonic

Step = Callable[[int, int, str], None]


@contextmanager
def progress() -> Iterator[Step]:
    """Progress on stderr: `step(done, total, what)` shows what is done, and the time left of the steps of one total.

    In a terminal one line changes; elsewhere each new `what` is a line. Total 0 is set-up, shown in terminals alone: it
    may still refuse the input, and a refusal is one line.
    """
    last, size, start, terminal = "", 0, 0.0, sys.stderr.isatty()

    def step(done: int, total: int, what: str) -> None:
        nonlocal last, size, start
        if total != size:
            size, start = total, monotonic()
        if terminal:
            share = f" {100 * done // total} %" if total else ""
            print(f"\r\033[K{what}{share}{_left(done, total, start)}", end="", file=sys.stderr, flush=True)
        elif total and what != last:
            print(f"fewkeys: {what}{_left(done, total, start)}", file=sys.stderr, flush=True)
        last = what

    try:
        yield step
    finally:
        if terminal:
            print("\r\033[K", end="", file=sys.stderr, flush=True)


def _left(done: int, total: int, start: float) -> str:
    """The time left; nothing in the first tenth of the work or the last second."""
    if 10 * done < total or not done:
        return ""
    seconds = (monotonic() - start) * (total / done - 1)
    return f", about {seconds:,.0f} s left" if seconds >= 1 else ""
