"""Timing that waits for work on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter

import torch


def now(device: torch.device) -> float:
    """The time in milliseconds, once a GPU has finished its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return 1e3 * perf_counter()


def clock(work: Callable[[], object], device: torch.device) -> float:
    """Milliseconds that `work` takes."""
    start = now(device)
    work()
    return now(device) - start


def in_words(milliseconds: float) -> str:
    """The time with two significant figures: "0.012 ms", "1.5 ms", "100 ms", "12,000 ms"."""
    return f"{float(f'{milliseconds:.2g}'):,.12g} ms"
